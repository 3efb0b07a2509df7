"""A run that was over goes on for more steps than it had: exactly, where the schedule allows it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.forked import Fault, Run, Server
from tests.end_to_end.outcome import assert_same_file, metrics
from tests.end_to_end.workplace import TASKS, Workplace

SHORT, LONG = 10, 20


def lengthened(name: str, **training: Any) -> dict[str, Any]:
    return {**TASKS[name], "training": {**TASKS[name]["training"], **training}}


def tasks_of(workplace: Workplace, steps: int) -> Path:
    """Two tasks whose rate is constant, one with dropout, evaluation and its best adapter, by steps and by epochs."""
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0, "save_steps": 4}
    best = {"load_best_model_at_end": True, "early_stopping_patience": 9}
    tasks = {
        "lora": lengthened("lora", **constant, **best, max_steps=steps),
        "prefix": lengthened("prefix", max_steps=None, num_train_epochs=steps / 10),  # 8 steps an epoch
    }
    return workplace.write_tasks(f"{steps}-steps.yaml", tasks)


def run(server: Server, workplace: Workplace, directory: Path, tasks: Path, **more: Any) -> Run:
    flags: list[str | Path] = ["--save", directory, "--load", directory]
    return server.run(workplace.arguments(*flags, tasks=tasks), **more)


def same(found: Path, wanted: Path) -> None:
    """The same files, tensors bit for bit."""
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in wanted.iterdir())
    for path in wanted.iterdir():
        assert_same_file(found / path.name, path)


def test_a_finished_run_trains_on_as_if_it_had_been_longer_from_the_beginning(
    workplace: Workplace, server: Server
) -> None:
    """Finished, raised, killed on the way, continued: every file as of the run at once."""
    once, raised = workplace.root / "once", workplace.root / "raised"
    assert run(server, workplace, once, tasks_of(workplace, LONG)).status == 0
    assert run(server, workplace, raised, tasks_of(workplace, SHORT)).status == 0
    assert (raised / f"lora/checkpoint-{SHORT}").is_dir() and (raised / "prefix/checkpoint-8").is_dir()
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 14, "kill before")
    assert run(server, workplace, raised, tasks_of(workplace, LONG), fault=fault).status == -signal.SIGKILL
    again = run(server, workplace, raised, tasks_of(workplace, LONG))
    assert again.status == 0, again.errors
    for name, steps in (("lora", LONG), ("prefix", 16)):
        same(raised / name / f"checkpoint-{steps}", once / name / f"checkpoint-{steps}")
        assert metrics(raised, name) == metrics(once, name)
    same(raised / "lora/best", once / "lora/best")


def test_a_schedule_that_ends_goes_on_where_the_user_says_so(workplace: Workplace, server: Server) -> None:
    linear = {"lr_scheduler_type": "linear", "warmup_steps": 0}
    lengths: list[dict[str, Any]] = [
        {"max_steps": SHORT},
        {"max_steps": LONG},
        {"max_steps": LONG, "lr_scheduler_on_resume": "continue"},
    ]
    short, long, on = (
        workplace.write_tasks(f"linear-{nth}.yaml", {"lora": lengthened("lora", **linear, **training)})
        for nth, training in enumerate(lengths)
    )
    directory = workplace.root / "linear"
    assert run(server, workplace, directory, short).status == 0
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    refused = run(server, workplace, directory, long)
    assert refused.status == 2 and "Traceback" not in refused.errors
    told = " ".join(refused.errors.split())
    assert f"task 'lora': training.max_steps: {LONG} steps instead of {SHORT}" in told
    assert "lr_scheduler_on_resume: continue" in told
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    killed = workplace.root / "linear-killed"
    shutil.copytree(directory, killed)
    assert run(server, workplace, directory, on).status == 0
    # Killed after a save on the way: the curve goes on, it is not planned anew.
    flags: list[str | Path] = ["--save", killed, "--load", killed, "--save-interval", "3"]
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 6, "kill before")
    assert server.run(workplace.arguments(*flags, tasks=on), fault=fault).status == -signal.SIGKILL
    assert run(server, workplace, killed, on).status == 0
    same(killed / f"lora/checkpoint-{LONG}", directory / f"lora/checkpoint-{LONG}")
    found = [line["learning_rate"] for line in metrics(killed, "lora") if "learning_rate" in line]
    peak = TASKS["lora"]["training"]["learning_rate"]
    wanted = [1 - step / SHORT for step in range(SHORT)]
    wanted += [0.1 + (0.5 - 0.1) / 2, *(1 - step / LONG for step in range(SHORT + 1, LONG))]
    assert found == pytest.approx([peak * factor for factor in wanted])
