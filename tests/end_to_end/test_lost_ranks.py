"""A rank that dies or stalls ends the run within the timeout, by its name; continued, the run ends as undisturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.forked import ROOT, Fault, Run, Server
from tests.end_to_end.outcome import assert_same_outcome
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.workplace import Workplace

TIMEOUT_S = 6.0  # the least that the flag takes
SILENCE_S = TIMEOUT_S / 2
GRACE_S, BUSY = 10.0, 3  # on a busy machine things take longer at times, and training does at others

TWO_STAGES = ("--pipeline-model-parallel-size", "2")
FORWARD = "megatron_mux.engine.train_step:TrainStep.forward"
BACKWARD = "megatron_mux.engine.train_step:TrainStep.backward"


def arguments_of(
    workplace: Workplace, save: Path, *more: str | Path, timeout: float = TIMEOUT_S
) -> list[str]:
    minutes = str(timeout / 60)
    usual = ("--save", save, "--save-interval", "3", "--distributed-timeout-minutes", minutes)
    return workplace.arguments(*usual, *more)


@pytest.fixture(scope="module")
def undisturbed(workplace: Workplace, server: Server) -> tuple[Path, float]:
    """Where a run of two stages left its results, and its seconds."""
    directory = workplace.root / "two-stages"
    runs = run_ranks(server, arguments_of(workplace, directory, *TWO_STAGES), 2)
    assert [run.status for run in runs] == [0, 0], "".join(run.errors for run in runs)
    assert [run.errors for run in runs] == ["", ""]
    return directory, max(run.seconds for run in runs)


def said(runs: list[Run]) -> list[str]:
    """Every line of standard error but torch's own remarks."""
    return [line for run in runs for line in run.errors.splitlines() if not line.startswith("[W")]


def continued(server: Server, workplace: Workplace, save: Path) -> None:
    runs = run_ranks(server, arguments_of(workplace, save, "--load", save, *TWO_STAGES), 2)
    assert [run.status for run in runs] == [0, 0], "".join(run.errors for run in runs)


CASES = {
    "the last stage killed": (1, Fault(FORWARD, 25, "kill before"), 0.0, "is gone: killed"),
    "the first stage killed": (0, Fault(BACKWARD, 25, "kill after"), 0.0, "is gone: killed"),
    "killed while it reads": (1, Fault("megatron_mux.backbone.model:Backbone.load", 1, "kill before"), 0.0, "is gone"),
    "the last stage stopped": (1, Fault(BACKWARD, 25, "stop"), SILENCE_S, "has not answered for 3 s"),
    "the first stage stopped": (0, Fault(FORWARD, 25, "stop"), SILENCE_S, "has not answered for 3 s"),
    "the last stage stalls": (1, Fault(FORWARD, 25, "stall"), TIMEOUT_S, "has been at '1F"),
    "the first stage stalls while it saves": (
        0, Fault("megatron_mux.checkpoint:save", 3, "stall"), TIMEOUT_S, "has been at 'saving'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_by_its_name_and_the_run_goes_on(
    case: str, workplace: Workplace, server: Server, undisturbed: tuple[Path, float]
) -> None:
    rank, fault, seconds, wanted = CASES[case]
    save = workplace.root / case.replace(" ", "-")
    runs = run_ranks(server, arguments_of(workplace, save, *TWO_STAGES), 2, {rank: fault})
    other = runs[1 - rank]
    assert other.status == 1, other.errors
    assert other.seconds < BUSY * undisturbed[1] + seconds + GRACE_S
    assert runs[rank].status == (1 if fault.kind == "stall" else -signal.SIGKILL)
    lines = said(runs)
    assert len(lines) == 1, lines
    (line,) = lines
    prefix = "pretrain_mux.py: " if rank == 1 or fault.kind == "stall" else "pretrain_mux.py: rank 1: "
    assert line.startswith(f"{prefix}rank {rank} (pipeline stage {rank}, "), line
    assert wanted in line and line.endswith(f"Continue from the last save with --load {save}."), line
    if (
        fault.kind.startswith("kill") or "saves" in case
    ):  # where the others ended during a pass, files are the same
        continued(server, workplace, save)
        assert_same_outcome(save, undisturbed[0])


def test_an_error_on_one_rank_is_named_by_the_others(workplace: Workplace, server: Server) -> None:
    arguments = arguments_of(workplace, workplace.root / "defect", *TWO_STAGES)
    runs = run_ranks(server, arguments, 2, {1: Fault(FORWARD, 25, "defect")})
    assert [run.status for run in runs] == [1, 1]
    (line,) = said(runs[:1])
    assert line.startswith("pretrain_mux.py: rank 1 (pipeline stage 1, "), line
    assert "failed: RuntimeError: a defect of ours: stopping." in line
    assert "Traceback" in runs[1].errors and runs[1].errors.endswith("RuntimeError: a defect of ours\n")


@pytest.mark.parametrize("kind", ["kill before", "stall"])
def test_a_tensor_parallel_neighbour_is_not_blamed(kind: str, workplace: Workplace, server: Server) -> None:
    arguments = arguments_of(
        workplace, workplace.root / f"four-{kind[:4]}", *TWO_STAGES, "--tensor-model-parallel-size", "2"
    )
    runs = run_ranks(server, arguments, 4, {2: Fault(FORWARD, 12, kind)})
    assert [run.status for run in runs] == [1, 1, 1 if kind == "stall" else -signal.SIGKILL, 1]
    (line,) = said(runs)
    assert line.startswith("pretrain_mux.py: rank 2 (pipeline stage 1, "), line
    assert "rank 3" not in line


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_where_ranks_meet_ends_all_of_them_at_once(
    rank: int, workplace: Workplace, server: Server
) -> None:
    save = workplace.root / f"out-of-memory-{rank}"
    tensor = ("--tensor-model-parallel-size", "2")
    fault = Fault("megatron_mux.backbone.model:Backbone.forward", 30, "no memory")
    runs = run_ranks(server, arguments_of(workplace, save, *tensor, timeout=90), 2, {rank: fault})
    assert [run.status for run in runs] == [1, 1], "".join(run.errors for run in runs)
    assert abs(runs[0].seconds - runs[1].seconds) < GRACE_S, "not the timeout"
    (line,) = said(runs)
    assert f"rank {rank} (pipeline stage 0, " in line
    assert "ran out of memory at 0F" in line and "a device's memory ran out: stopping." in line
    assert line.endswith(f"Continue from the last save with --load {save}."), line
    runs = run_ranks(server, arguments_of(workplace, save, "--load", save, *tensor), 2)
    assert [run.status for run in runs] == [0, 0], "".join(run.errors for run in runs)


SLOW_TO_SAY = """
import sys, time
from megatron_mux.liveness import Liveness
from megatron_mux.training.loop import Loop
import pretrain_mux

def later(original, seconds):
    def call(*arguments):
        time.sleep(seconds)
        return original(*arguments)
    return call

# By then torchrun has told the other rank to end.
Loop.close, Liveness._end = later(Loop.close, 1.0), later(Liveness._end, 1.5)
sys.exit(pretrain_mux.main())
"""


def processes_of(save: Path) -> dict[int, int]:
    """Process ids by rank of the run that saves there; torchrun is -1."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().split(b"\0")
            variables = (directory / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if str(save).encode() in command:
            ranks = [int(text[5:]) for text in variables if text.startswith(b"RANK=")]
            found[ranks[0] if ranks else -1] = int(directory.name)
    return found


@pytest.mark.slow
def test_under_torchrun(workplace: Workplace, server: Server, undisturbed: tuple[Path, float]) -> None:
    save, script = workplace.root / "torchrun", workplace.root / "slow_to_say.py"
    script.write_text(SLOW_TO_SAY)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    torchrun = [server.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.Popen(
        [*torchrun, str(script), *arguments_of(workplace, save, *TWO_STAGES, timeout=120.0)],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    while run.poll() is None and len(list(save.glob("lora/checkpoint-*"))) < 2:
        time.sleep(0.02)
    os.kill(processes_of(save)[1], signal.SIGKILL)
    start = time.monotonic()
    assert run.stderr is not None
    errors = run.stderr.read()
    assert run.wait(timeout=60) != 0, errors
    assert time.monotonic() - start < 3 * GRACE_S, "torchrun itself takes its time, too"
    assert not processes_of(save)
    lines = [line for line in errors.splitlines() if line.startswith("pretrain_mux.py: ")]
    assert len(lines) == 1 and lines[0].startswith("pretrain_mux.py: rank 1 (pipeline stage 1, "), errors
    assert errors.count("Traceback (most recent call last)") == 1, f"not torchrun's alone: {errors}"
    continued(server, workplace, save)
    assert_same_outcome(save, undisturbed[0])
