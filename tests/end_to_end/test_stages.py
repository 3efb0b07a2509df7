"""The script on two ranks: several stages to each, planned beforehand, weights in host memory, continued."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.outcome import assert_same_outcome
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.test_plans import tool
from tests.end_to_end.workplace import Workplace

pytestmark = pytest.mark.versions

PIPELINE = ("--pipeline-model-parallel-size", "2")
VIRTUAL = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")


def run(
    server: Server, workplace: Workplace, save: Path, *more: str | Path, fault: Fault | None = None
) -> str:
    """Run on two ranks, of which the last meets the fault; returns what the first printed."""
    usual = workplace.arguments("--save", save, "--save-interval", "3", *more)
    runs = run_ranks(server, usual, 2, {} if fault is None else {1: fault})
    wanted = [0, 0] if fault is None else [1, -signal.SIGKILL]
    assert [own.status for own in runs] == wanted, "".join(own.errors for own in runs)
    return runs[0].output


@pytest.fixture(scope="module")
def virtual(workplace: Workplace, server: Server) -> Path:
    """Where a run with two stages to each rank left its results."""
    directory = workplace.root / "virtual"
    run(server, workplace, directory, *VIRTUAL)
    return directory


def test_what_a_run_with_virtual_stages_leaves(virtual: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json.loads((virtual / "plan.json").read_text())
    assert (plan["stages"], plan["virtual"], plan["split"]) == (4, 2, [1, 1, 1, 1])
    picture = (virtual / "schedule.svg").read_text()
    assert "stages 0,2" in picture and "stages 1,3" in picture
    drawn = ["--output", virtual / "both.svg", "--trace", virtual / "both.json"]
    assert tool("draw_schedule").main([str(word) for word in ["--run", virtual, *drawn]]) == 0
    assert "drawn in" in capsys.readouterr().out


def test_it_continues_with_its_split(virtual: Path, workplace: Workplace, server: Server) -> None:
    save = workplace.root / "virtual-killed"
    # Within step 7: the save after step 6 began only when the one after step 3 was complete. Had the run nothing to
    # continue from, it would start anew with the stages that the flags say, one to a rank, and round differently.
    fault = Fault("megatron_mux.engine.train_step:TrainStep.backward", 48, "kill before")
    run(server, workplace, save, *VIRTUAL, fault=fault)
    assert f"continuing from {save}" in run(server, workplace, save, *PIPELINE, "--load", save)
    assert_same_outcome(save, virtual)


def test_a_plan_for_virtual_stages_is_followed(workplace: Workplace, server: Server, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    words = [
        "--backbone",
        workplace.backbone,
        "--tasks",
        workplace.tasks,
        "--stages",
        "2",
        "--virtual-stages",
        "2",
    ]
    assert tool("plan").main([str(word) for word in [*words, "--output", file, "--json"]]) == 0
    run(server, workplace, tmp_path / "run", *PIPELINE, "--mux-plan", file)
    planned, taken = (json.loads(path.read_text()) for path in (file, tmp_path / "run" / "plan.json"))
    assert (taken["virtual"], taken["split"]) == (planned["virtual"], planned["split"]) == (2, [1, 1, 1, 1])


def test_weights_in_host_memory_change_nothing(virtual: Path, workplace: Workplace, server: Server) -> None:
    save = workplace.root / "offloaded"
    run(server, workplace, save, *VIRTUAL, "--mux-backbone-weights", "offloaded")
    assert_same_outcome(save, virtual)
