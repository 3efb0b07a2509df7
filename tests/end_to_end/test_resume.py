"""A run that was killed, wherever it was, and continued ends with the very bits of one that was not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.forked import ROOT, Fault, Run, Server
from tests.end_to_end.outcome import (
    assert_same_file,
    assert_same_outcome,
    final_checkpoint,
    metrics,
    saved_together,
)
from tests.end_to_end.workplace import TASKS, Workplace

# When the run is killed: after so many of its 14 steps (none: while it still reads), and so many milliseconds more. A
# step with its save takes about 40. `PLACES` are those that such moments may miss.
MOMENTS = [(steps, random.Random(2024 + steps).randrange(40)) for steps in (0, 2, 5, 8, 12)]
TRIES = 5
# And at exact places of a save: a file half written, before and after a checkpoint or a manifest gets its name.
PLACES = {
    "adapter half written": Fault("megatron_mux.checkpoint:write_tensors", 3, "kill halfway"),
    "before a checkpoint is renamed": Fault("os:rename", 5, "kill before"),
    "after a checkpoint is renamed": Fault("os:rename", 4, "kill after"),
    "before a manifest is renamed": Fault("megatron_mux.files:os.replace", 4, "kill before"),
    "between manifest and plan": Fault("megatron_mux.files:os.replace", 4, "kill after"),
    "within a step": Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 20, "kill before"),
}

LONG = 120  # steps


@pytest.fixture(scope="module")
def undisturbed(workplace: Workplace, server: Server) -> tuple[Path, Run]:
    """A run from beginning to end."""
    directory = workplace.root / "undisturbed"
    run = server.run(workplace.arguments("--save", directory, "--save-interval", "3"))
    assert run.status == 0, run.errors
    return directory, run


def assert_tidy(directory: Path) -> None:
    """Nothing half-written is left under a name that means something."""
    left = [path for path in directory.rglob("*") if path.name.startswith(".partial")]
    assert not left, left


def resume(
    server: Server, workplace: Workplace, directory: Path, *more: str, tasks: Path | None = None
) -> Run:
    """Continue a run to its end."""
    flags: list[str | Path] = ["--save", directory, "--load", directory, "--save-interval", "3", *more]
    run = server.run(workplace.arguments(*flags, tasks=tasks))
    assert run.status == 0, run.errors
    assert "Traceback" not in run.errors
    return run


@pytest.mark.parametrize(("steps", "more"), MOMENTS)
def test_killed_at_any_moment(
    steps: int, more: int, workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]
) -> None:
    directory, run = killed(server, workplace, steps, more)
    assert run.status == -signal.SIGKILL, f"not killed, {TRIES} times over: {run.errors}"
    exact = saved_together(directory)
    resume(server, workplace, directory)
    assert_same_outcome(directory, undisturbed[0], exact)


def killed(server: Server, workplace: Workplace, steps: int, more: int) -> tuple[Path, Run]:
    """A run that is killed at a moment. On a busy machine it may be over by then: once more, and a step earlier."""
    for nth in range(TRIES):
        directory = workplace.root / f"killed-at-{steps}-{more}-{nth}"

        def now(directory: Path = directory, after: int = max(0, steps - nth)) -> bool:
            if steps_seen(directory) < after:
                return False
            time.sleep(more / 1000)
            return True

        run = server.run(workplace.arguments("--save", directory, "--save-interval", "3"), kill_after=now)
        if run.status != 0:
            break
    return directory, run


def test_a_finished_run_continued_changes_nothing(
    workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]
) -> None:
    directory = workplace.root / "finished"
    shutil.copytree(undisturbed[0], directory)
    resume(server, workplace, directory)
    assert_same_outcome(directory, undisturbed[0])


def test_continued_in_another_precision_it_says_so(
    workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]
) -> None:
    """Its tasks are done: nothing is computed."""
    directory = workplace.root / "other-precision"
    shutil.copytree(undisturbed[0], directory)
    for flags, said in (((), False), (("--bf16",), True)):
        run = resume(server, workplace, directory, *flags)
        told = " ".join((run.output + run.errors).split())  # lines are wrapped
        assert ("by a run in float32: going on in bfloat16" in told) == said


@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_delicate_place(
    place: str, workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]
) -> None:
    directory = workplace.root / place.replace(" ", "-")
    run = server.run(workplace.arguments("--save", directory, "--save-interval", "3"), fault=PLACES[place])
    assert run.status == -signal.SIGKILL, f"never came to that place: {run.errors}"
    assert saved_together(directory)
    resume(server, workplace, directory)
    assert_same_outcome(directory, undisturbed[0])
    assert_tidy(directory)


def test_killed_again_and_again(workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]) -> None:
    directory, exact = workplace.root / "again-and-again", True
    for nth in (11, 10, 9):
        fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", nth, "kill after")
        run = server.run(
            workplace.arguments("--save", directory, "--load", directory, "--save-interval", "2"), fault=fault
        )
        assert run.status == -signal.SIGKILL, run.errors
        exact = exact and saved_together(directory)
    resume(server, workplace, directory)
    assert_same_outcome(directory, undisturbed[0], exact)


@pytest.mark.versions
@pytest.mark.parametrize("policy", ["serial", "temporal", "spatial"])
def test_every_policy_resumes_exactly(policy: str, workplace: Workplace, server: Server) -> None:
    flags = ["--save-interval", "3", "--mux-policy", policy]
    wanted, directory = workplace.root / f"whole-{policy}", workplace.root / f"killed-{policy}"
    run = server.run(workplace.arguments("--save", wanted, *flags))
    assert run.status == 0, run.errors
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 19, "kill before")
    assert server.run(workplace.arguments("--save", directory, *flags), fault=fault).status == -signal.SIGKILL
    assert policy == "serial" or saved_together(directory)
    resume(server, workplace, directory, "--mux-policy", policy)
    assert_same_outcome(directory, wanted)


def test_continued_into_another_directory(
    workplace: Workplace, server: Server, undisturbed: tuple[Path, Run]
) -> None:
    first, second = workplace.root / "first", workplace.root / "second"
    fault = Fault("megatron_mux.engine.optimize:TaskOptimizer.step", 20, "kill before")
    flags = ["--save-interval", "3", "--mux-keep-checkpoints", "1"]
    assert server.run(workplace.arguments("--save", first, *flags), fault=fault).status == -signal.SIGKILL
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    run = server.run(workplace.arguments("--load", first, "--save", second, *flags))
    assert run.status == 0, run.errors
    for task in ("lora", "diff"):
        ours, theirs = final_checkpoint(second, task), final_checkpoint(undisturbed[0], task)
        for path in theirs.iterdir():
            if path.name != "README.md":  # it tells of the second run only, which has no figures of the first
                assert_same_file(ours / path.name, path)
    # The run that was continued is not touched, however many of its own checkpoints the new one drops.
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == before


def test_an_empty_directory_starts_anew_with_a_warning(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    run = server.run(workplace.arguments("--save", tmp_path / "new", "--load", tmp_path / "new"))
    assert run.status == 0, run.errors
    assert "starting anew" in run.output + run.errors


@pytest.fixture(scope="module")
def long_run(workplace: Workplace, server: Server) -> tuple[Path, Path]:
    """A task file whose run lasts long enough to be watched, and what comes of it undisturbed."""
    task = {key: value for key, value in TASKS["lora"].items() if key != "eval"}
    tasks = {"lora": {**task, "training": {**task["training"], "max_steps": LONG}}}
    file, directory = workplace.write_tasks("long.yaml", tasks), workplace.root / "long"
    run = server.run(workplace.arguments("--save", directory, tasks=file))
    assert run.status == 0, run.errors
    return file, directory


def steps_seen(directory: Path) -> int:
    """Steps that a running task has told of."""
    path = directory / "lora" / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def assert_same_long_run(found: Path, wanted: Path) -> None:
    """The same adapter and metrics at the end."""
    name = f"lora/checkpoint-{LONG}/adapter_model.safetensors"
    assert (found / name).read_bytes() == (wanted / name).read_bytes()
    assert metrics(found, "lora") == metrics(wanted, "lora")


@pytest.mark.versions
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_asked_to_stop_it_saves_and_leaves(
    number: signal.Signals, workplace: Workplace, server: Server, long_run: tuple[Path, Path]
) -> None:
    file, wanted = long_run
    directory = workplace.root / f"asked-to-stop-{number.name}"
    run = server.run(
        workplace.arguments("--save", directory, tasks=file),
        kill_after=lambda: steps_seen(directory) >= 30,
        signal_number=number,
    )
    assert run.status == 0, run.errors
    assert f"stopped by a signal: every task is saved: continue with --load {directory}" in run.output
    (saved,) = directory.glob("lora/checkpoint-*")
    assert 20 <= int(saved.name.split("-")[1]) < LONG
    resume(server, workplace, directory, "--save-interval", "100", tasks=file)
    assert_same_long_run(directory, wanted)


@pytest.mark.versions
def test_the_script_itself_killed_and_continued(
    workplace: Workplace, server: Server, long_run: tuple[Path, Path]
) -> None:
    """Once without the server of forks: `python pretrain_mux.py`, as a user starts it."""
    file, wanted = long_run
    directory = workplace.root / "script"
    arguments = workplace.arguments("--save", directory, "--save-interval", "30", tasks=file)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(workplace.root / "script.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_mux.py"), *arguments],
            env=environment,
            stdout=log,
            stderr=log,
        )
    while process.poll() is None and steps_seen(directory) < 50:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL, (workplace.root / "script.log").read_text()
    resume(server, workplace, directory, "--save-interval", "100", tasks=file)
    assert_same_long_run(directory, wanted)
