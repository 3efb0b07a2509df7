"""A master with expert managers as a user runs them: killed, stalled, continued with fewer of them and without any."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.harness import assert_close
from tests.end_to_end.outcome import metrics
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.test_lost_ranks import FORWARD, TIMEOUT_S, said
from tests.end_to_end.test_profile_experts import TASKS, write_placement
from tests.end_to_end.workplace import Workplace, furnish

STEPS = 14
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
NAMES = ("attention", "experts", "both")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a Mixtral."""
    made = furnish(tmp_path_factory.mktemp("managers"), "mixtral")
    tasks = {
        name: {**task, "training": {**task["training"], "max_steps": STEPS}} for name, task in TASKS.items()
    }
    tasks["both"] = {
        **tasks["experts"],
        "adapter": {"peft_type": "LORA", "r": 3, "target_modules": ["v_proj"], "target_parameters": BOTH},
        "eval": {"path": "held-out.jsonl", "eval_steps": 7},
    }
    made.write_tasks("tasks.yaml", tasks)
    return made


def test_continued_with_fewer_managers_and_without_any(place: Workplace, server: Server) -> None:
    """One process, three, two, then expert parallelism, each killed: adapters and metrics are those of one process."""
    kept, moved = place.root / "kept", place.root / "moved"
    file = write_placement(
        place, "uneven.json", [[[1], [1], [0], [1], [1]], *[[[0], [1], [0], [0], [0]]] * 3]
    )
    killed = Fault("megatron_mux.engine.train_step:TrainStep.backward", 5, "kill before")
    managers = ("--mux-expert-placement", file, "--mux-expert-managers")
    gone: dict[int, list[str]] = {}
    for save, ranks, more in (
        (kept, 1, ()),
        (moved, 1, ()),
        (moved, 3, ("--load", moved, *managers, "2")),
        (moved, 2, ("--load", moved, *managers, "auto", "--mux-expert-capacity", "20,9")),
        (moved, 2, ("--load", moved, "--expert-model-parallel-size", "2")),
    ):
        ends = save == kept or "--expert-model-parallel-size" in more
        words = place.arguments("--save", save, "--save-interval", "2", *more)
        runs = run_ranks(server, words, ranks, {} if ends else {ranks - 1: killed})
        wanted = [0] * ranks if ends else [*[1] * (ranks - 1), -signal.SIGKILL]
        assert [own.status for own in runs] == wanted, "".join(own.errors for own in runs)
        if not ends:
            gone[ranks] = said(runs)
        if ranks == 2 and not ends:
            assert "--mux-expert-capacity 20,9: is for 2 expert managers, and there are 1" in runs[0].output
            assert "the experts of those that are gone, 7 to manager 1" in runs[0].output
            assert "the expert manager holds 20 of the backbone's 20 experts" in runs[0].output
    assert len(gone[3]) == 1, gone[3]
    assert re.search(r"expert manager 2 \(rank 2, \S+\) is gone: killed", gone[3][0]), gone[3]
    for name in NAMES:
        found, reference = (
            load_file(directory / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
            for directory in (moved, kept)
        )
        assert_close(found, reference, 1e-4, name)
        for ours, theirs in zip(metrics(moved, name), metrics(kept, name), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-4)


def test_a_manager_that_stalls_is_named(place: Workplace, server: Server, tmp_path: Path) -> None:
    words = place.arguments("--save", tmp_path / "stalled", "--mux-expert-managers", "2")
    words += ["--distributed-timeout-minutes", str(TIMEOUT_S / 60)]
    runs = run_ranks(server, words, 3, {1: Fault(FORWARD, 4, "stall")})
    assert [own.status for own in runs] == [1, 1, 1]
    (line,) = said(runs)
    assert re.search(r"expert manager 1 \(rank 1, \S+\) has been at '0F", line), line


def test_a_wrong_number_of_processes_is_refused(place: Workplace, server: Server, tmp_path: Path) -> None:
    words = place.arguments("--save", tmp_path / "refused", "--mux-expert-managers", "3")
    runs = run_ranks(server, words, 2)
    assert [own.status for own in runs] == [2, 2]
    wanted = "3 expert managers and their master are 4 processes, but 2 processes were started"
    assert wanted in runs[0].errors and not (tmp_path / "refused").exists()
