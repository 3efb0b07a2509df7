"""Sweeps from the command line: who stops and who goes on, what survivors learn, and that kills change nothing."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from tests.end_to_end.forked import Fault, Run, Server
from tests.end_to_end.harness import assert_close
from tests.end_to_end.outcome import assert_same_file, metrics
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.workplace import Workplace

ADAPTER = {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
TRAINING = {"per_device_train_batch_size": 4, "max_steps": 12, "lr_scheduler_type": "cosine", "seed": 1}
SECTIONS: dict[str, Any] = {
    "adapter": ADAPTER,
    "data": {"path": "pairs.jsonl", "max_length": 24},
    "training": TRAINING,
    "eval": {"path": "held-out.jsonl"},
}
GRID = {"adapter.r": [2, 8], "training.learning_rate": [1.0e-4, 3.0e-3, 1.0e-2]}
SAMPLED = {
    "training.learning_rate": {"log_uniform": [1.0e-4, 1.0e-1]},
    "sampler": {"type": "tpe", "trials": 5, "at_once": 1, "seed": 2},
}
HALVING = {"type": "halving", "min_steps": 2, "factor": 2}


def write(workplace: Workplace, name: str, scheduler: Any, *tasks: Any) -> Path:
    path = workplace.root / name
    path.write_text(
        yaml.safe_dump({"defaults": SECTIONS, "scheduler": scheduler, "tasks": list(tasks)}, sort_keys=False)
    )
    return path


def train(server: Server, workplace: Workplace, tasks: Path, directory: Path, *more: str, **how: Any) -> Run:
    """A run that computes each task by itself, so that neighbours decide no rounding."""
    flags: list[str | Path] = ["--save", directory, "--mux-fp32", "--mux-policy", "temporal", *more]
    return server.run(workplace.arguments(*flags, tasks=tasks), **how)


def results(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "results.csv").open()))


def decisions(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "sweep.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def file(workplace: Workplace) -> Path:
    """A grid, and trials of a sampler one at a time, which are stopped before there are others to compare with."""
    return write(
        workplace, "sweep.yaml", HALVING, {"name": "grid", "sweep": GRID}, {"name": "tpe", "sweep": SAMPLED}
    )


@pytest.fixture(scope="module")
def undisturbed(workplace: Workplace, server: Server, file: Path) -> tuple[Path, Run]:
    directory = workplace.root / "undisturbed-sweep"
    run = train(server, workplace, file, directory)
    assert run.status == 0, run.errors
    return directory, run


def test_the_worse_configurations_stop_and_the_best_one_is_named(undisturbed: tuple[Path, Run]) -> None:
    directory, run = undisturbed
    rows = [row for row in results(directory) if row["sweep"] == "grid"]
    assert [row["steps"] for row in rows] == ["12", "4", "4", "2", "2", "2"]
    assert [row["status"] for row in rows] == ["finished", *["pruned"] * 5]
    assert [float(row["eval_loss"]) for row in rows] == sorted(float(row["eval_loss"]) for row in rows)
    for row in rows:
        saved = directory / row["checkpoint"]
        assert saved.name == f"checkpoint-{row['steps']}" and (saved / "training_state.safetensors").exists()
        assert [line["step"] for line in metrics(directory, row["task"]) if "loss" in line] == [
            *range(1, int(row["steps"]) + 1)
        ]
    assert f"best: {rows[0]['task']} (eval_loss" in run.output
    assert (
        "4th of 6 at step 2, where the best 3 go on" in rows[3]["reason"] and rows[3]["reason"] in run.output
    )
    assert "<svg" in (directory / "curves.svg").read_text()


def test_one_that_was_stopped_goes_on_once_it_is_among_the_best(undisturbed: tuple[Path, Run]) -> None:
    directory, _ = undisturbed
    made = [own for own in decisions(directory) if own["sweep"] == "tpe"]
    (first, *_) = made
    (measured,) = [
        line for line in metrics(directory, first["task"]) if line["step"] == 2 and "eval_loss" in line
    ]
    assert (first["step"], first["eval_loss"]) == (2, measured["eval_loss"])
    assert (first["decision"], first["reason"]) == ("prune", "1st of 1 at step 2, where nobody goes on yet")
    resumed = {own["task"] for own in made if own["decision"] == "resume"}
    assert resumed and sum(own["decision"] == "begin" for own in made) == 4
    for name in resumed:
        steps = [line["step"] for line in metrics(directory, name) if "loss" in line]
        assert steps == [*range(1, len(steps) + 1)] and len(steps) > 2
    finished = [row for row in results(directory) if row["sweep"] == "tpe" and row["status"] == "finished"]
    assert finished and all(row["steps"] == "12" for row in finished)


def test_survivors_are_what_each_is_alone(
    workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]
) -> None:
    """To the bit, in one process whose tasks are computed one by one; also one that was stopped and went on."""
    directory, _ = undisturbed
    chosen = [row for row in results(directory) if row["status"] == "finished"]
    tasks = []
    for row in chosen:
        training = {**TRAINING, "learning_rate": float(row["training.learning_rate"])}
        adapter = {**ADAPTER, **({"r": int(row["adapter.r"])} if row["adapter.r"] else {})}
        tasks.append({"name": row["task"], "adapter": adapter, "training": training, "eval": None})
    alone = workplace.root / "survivors-alone"
    path = workplace.root / "survivors.yaml"
    path.write_text(yaml.safe_dump({"defaults": SECTIONS, "tasks": tasks}))
    assert train(server, workplace, path, alone).status == 0
    assert len(chosen) >= 2
    for row in chosen:
        for name in ("adapter_model.safetensors", "training_state.safetensors"):
            assert_same_file(directory / row["checkpoint"] / name, alone / row["checkpoint"] / name)


def at_random(seed: int) -> tuple[Fault, Fault]:
    """Two kills where any of these functions is called for the n-th time, each more often than that in both runs."""
    r = Random(seed)
    places = {
        "megatron_mux.engine.optimize:TaskOptimizer.step": 12,
        "megatron_mux.files:os.replace": 9,
        "os:rename": 3,
    }

    def fault() -> Fault:
        function = r.choice([*places])
        return Fault(function, r.randint(1, places[function]), r.choice(["kill before", "kill after"]))

    return fault(), fault()


def assert_survivors_close(directory: Path, undisturbed: Path) -> None:
    """Survivors of both runs are alike to rounding; those of the second are what each is alone, to the bit."""
    ours, theirs = (
        {row["task"]: row["checkpoint"] for row in results(own) if row["status"] == "finished"}
        for own in (directory, undisturbed)
    )
    assert len(ours.keys() & theirs.keys()) >= 2
    for name in ours.keys() & theirs.keys():
        found, wanted = (
            load_file(run / made[name] / "adapter_model.safetensors")
            for run, made in ((directory, ours), (undisturbed, theirs))
        )
        assert_close(found, wanted, 2e-3, name)
        losses = [
            [line["loss"] for line in metrics(run, name) if "loss" in line]
            for run in (directory, undisturbed)
        ]
        assert losses[0] == pytest.approx(losses[1], abs=1e-4)


def test_survivors_in_shared_passes_are_close_to_what_each_is_alone(
    workplace: Workplace, server: Server, file: Path, undisturbed: tuple[Path, Run], tmp_path: Path
) -> None:
    run = server.run(workplace.arguments("--save", tmp_path, "--mux-fp32", tasks=file))
    assert run.status == 0, run.errors
    assert_survivors_close(tmp_path, undisturbed[0])


@pytest.mark.parametrize(
    "faults",
    [
        (Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 17, "kill before"),
         Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 9, "kill before")),
        (Fault("megatron_mux.files:os.replace", 5, "kill after"), Fault("os:rename", 3, "kill before")),
        at_random(37),
    ],
)  # fmt: skip
def test_killed_twice_it_decides_the_same(
    faults: tuple[Fault, Fault],
    workplace: Workplace,
    server: Server,
    file: Path,
    undisturbed: tuple[Path, Run],
    tmp_path: Path,
) -> None:
    directory = tmp_path / "killed"
    for fault in (*faults, None):
        run = train(server, workplace, file, directory, "--load", str(directory), fault=fault)
        assert run.status == (0 if fault is None else -signal.SIGKILL), run.errors
    wanted = undisturbed[0]
    assert results(directory) == results(wanted)
    assert sorted(map(str, decisions(directory))) == sorted(map(str, decisions(wanted)))
    for row in results(wanted):
        ours, theirs = (
            [line for line in metrics(own, row["task"]) if line["step"]] for own in (directory, wanted)
        )
        assert ours == theirs
        name = f"{row['checkpoint']}/adapter_model.safetensors"
        assert_same_file(directory / name, wanted / name)


def test_two_ranks_decide_the_same_also_when_continued(
    workplace: Workplace, server: Server, file: Path, undisturbed: tuple[Path, Run], tmp_path: Path
) -> None:
    usual = (
        "--save",
        tmp_path,
        "--mux-fp32",
        "--mux-policy",
        "temporal",
        "--pipeline-model-parallel-size",
        "2",
    )
    for more in (("--exit-interval", "3"), ("--load", tmp_path)):
        runs = run_ranks(server, workplace.arguments(*usual, *more, tasks=file), 2)
        assert [run.status for run in runs] == [0, 0], runs[0].errors
    ours, theirs = results(tmp_path), results(undisturbed[0])
    for name in ("task", "status", "steps", "reason"):
        assert [row[name] for row in ours] == [row[name] for row in theirs]
    made, wanted = (
        sorted((own["task"], own["number"], own["decision"], own["reason"]) for own in decisions(run))
        for run in (tmp_path, undisturbed[0])
    )
    assert made == wanted
    assert_survivors_close(tmp_path, undisturbed[0])


def test_continued_without_its_scheduler_all_train_to_their_end(
    workplace: Workplace, server: Server, undisturbed: tuple[Path, Run], tmp_path: Path
) -> None:
    path = write(workplace, "in-full.yaml", {"type": "none"}, {"name": "grid", "sweep": GRID})
    run = train(server, workplace, path, tmp_path / "full", "--load", str(undisturbed[0]))
    assert run.status == 0, run.errors
    assert {(row["steps"], row["status"]) for row in results(tmp_path / "full")} == {("12", "finished")}


def test_what_a_scheduler_stops_needs_a_place(workplace: Workplace, server: Server, file: Path) -> None:
    run = server.run(workplace.arguments("--mux-fp32", tasks=file))
    assert run.status == 2 and "scheduler: what it stops is kept on disk: use --save DIR" in run.errors
