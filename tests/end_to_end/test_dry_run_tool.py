"""`tools/estimate_memory.py --method dry-run`, as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.dry_run import selection
from megatron_mux.dry_run.rank_estimate import RankEstimate
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.fusion.plan import dumps, keep_tasks, plan_for
from megatron_mux.memory.caching.settings import Settings
from megatron_mux.memory.estimate import Prediction
from megatron_mux.memory.stream.events import StreamBuilder
from tests.end_to_end.estimating import OURS, TASKS
from tests.end_to_end.forked import ROOT
from tests.end_to_end.test_estimate_memory import processor_seconds
from tests.end_to_end.test_plans import tool

Call = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("warm_workers")
PYTHON = sys.executable  # as a user starts it


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between calls is not the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_MUX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """Of a small backbone and two tasks, on two GPUs."""
    (tmp_path / "config.json").write_text(json.dumps(OURS))
    (tmp_path / "tasks.yaml").write_text(TASKS)
    words = ["--model", str(tmp_path), "--tasks", str(tmp_path / "tasks.yaml"), "--gpus", "2"]
    return [*words, "--gpu-memory", "24GiB", "--method", "dry-run"]


@pytest.fixture
def estimate(capsys: pytest.CaptureFixture[str], flags: list[str]) -> Call:
    """Runs the tool with further flags, the last of which win: status, output, errors."""

    def call(*more: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = tool("estimate_memory").main([*flags, *more])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def test_the_answer_for_a_task_file_and_at_once_when_it_is_known(
    estimate: Call, flags: list[str], tmp_path: Path
) -> None:
    picture = tmp_path / "memory.svg"
    status, output, errors = estimate("--json", "--plot", str(picture))
    found = json.loads(output)
    assert status == 0 and "dry run of 2DP on rank(s) 0 of 2" in errors and "<svg" in picture.read_text()
    (method,) = found["methods"]
    assert (found["selected"], method["estimator"], method["fits"]) == ("2DP", "dry-run", True)
    assert found["flags"] == method["flags"] and "--bf16" in found["flags"]
    assert found["data_not_read"] == ["a", "b"] and found["sequence_length"] == 64
    assert sum(method["breakdown"].values()) == method["peak_process_bytes"]
    least, most = method["peak_process_interval_bytes"]
    assert least < method["peak_process_bytes"] < most
    assert method["worst_rank"] == {"stage": 0, "rank": 0, "at": f"{method['moment']} ({method['action']})"}
    used = [processor_seconds()]
    # How fast the machine is, by what the answer needs most of; twice, as other processes change the time.
    for command in 2 * ([PYTHON, "-c", "import torch"], [PYTHON, "tools/estimate_memory.py", *flags]):
        again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        used.append(processor_seconds())
    imports, *others = (after - before for before, after in pairwise(used))
    imports, answer = max(imports, others[1]), min(others[0], others[2])
    # 1.2 times as long; a dry run takes 8 times. These are 3 s where importing torch takes 1.9.
    assert answer < 1.6 * imports and not again.stderr
    for word in (
        "2DP",
        "upper bound: the data of a, b",
        "run it with: megatron-mux train",
        "--gpus 2",
        *found["flags"],
    ):
        assert word in again.stdout, word
    (tmp_path / "missing.jsonl").write_text('{"text": "now there are data"}\n')
    assert "dry run of" in estimate("--json")[2]  # although, for want of a tokenizer, they cannot be read


def test_a_whole_plan(estimate: Call, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan = replace(plan_for("temporal", {"a": 1, "b": 2}, 2), policy="auto")
    file.write_text(dumps(plan))
    status, output, _ = estimate("--plan", str(file), "--json", "--backbone-weights", "offloaded")
    (method,) = json.loads(output)["methods"]
    assert status == 0 and method["flags"] == [
        "--mux-plan",
        str(file),
        "--pipeline-model-parallel-size",
        "2",
        "--bf16",
        "--mux-backbone-weights",
        "offloaded",
    ]
    assert [rank["stage"] for rank in method["ranks"]] == [0, 1]
    assert method["micro_batches"] == [bucket.micro_batches for bucket in plan.buckets]
    assert method["backbone_weights"] == "offloaded"
    file.write_text(dumps(replace(plan, data=2)))
    assert "is for 4 GPU(s), --gpus says 2" in estimate("--plan", str(file))[2]
    file.write_text(dumps(keep_tasks(plan, ["a"])))
    assert "tasks.yaml: b" in estimate("--plan", str(file))[2]


@pytest.mark.parametrize(
    ("flags_more", "said"),
    [
        (("--precision", "fp16"), "--precision fp16: --method dry-run supports bf16 and fp32"),
        (("--batch-size", "4"), "--batch-size: --tasks defines it"),
        (("--plan", "nowhere.json"), "nowhere.json: cannot be read"),
        (("--plan", "p", "--method", "ours"), "--plan: --method ours does not use it for --tasks"),
        (("--gpu-memory", "80"), "is no GPU's"),
        (("--sequence-length", "32"), "data.max_length: 64 is more than --sequence-length 32"),
    ],
)
def test_wrong_input_in_one_line(estimate: Call, flags_more: tuple[str, ...], said: str) -> None:
    status, output, errors = estimate(*flags_more)
    assert status == 2 and not output and said in errors, errors


def test_without_tasks_there_is_nothing_to_run(estimate: Call, flags: list[str]) -> None:
    at = flags.index("--tasks")
    del flags[at : at + 2]
    status, _, errors = estimate()
    assert status == 2 and "add --tasks FILE" in errors


def test_methods_are_tried_until_one_fits(estimate: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def estimate_ranks(parts: Sequence[tuple[RunSpec, int]], memory: int, **_: Any) -> list[RankEstimate]:
        asked.append([rank for _, rank in parts])
        fits = len(asked) in (3, 8)
        return [
            RankEstimate(rank, rank, fits, Prediction(StreamBuilder().done(), Settings(), 0), "")
            for _, rank in parts
        ]

    monkeypatch.setattr(selection, "estimate_ranks", estimate_ranks)
    found = json.loads(estimate("--json", "--gpu-memory", "23GiB")[1])
    assert [method["fits"] for method in found["methods"]] == [False, False, True]
    assert found["selected"] == found["methods"][-1]["name"]
    assert len({tuple(method["flags"]) for method in found["methods"]}) == 3
    status, output, _ = estimate("--gpu-memory", "22GiB")
    assert status == 0 and len(asked) == 7 and "selected: nothing" in output
