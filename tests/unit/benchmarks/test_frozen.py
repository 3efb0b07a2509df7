"""What the comparison of two commits sees: each thing that may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.frozen.answered import apart, said
from benchmarks.frozen.trained import layouts_apart, losses_apart, tensors_apart

CHECKPOINT = "run/task/checkpoint-2"


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    """The same run twice."""
    for side in ("old", "new"):
        checkpoint = tmp_path / side / CHECKPOINT
        checkpoint.mkdir(parents=True)
        save_file({"a": torch.ones(2, 3)}, checkpoint / "adapter_model.safetensors")
        lines = [{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 3.0}]
        metrics = checkpoint.parent / "metrics.jsonl"
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "old", tmp_path / "new"


def _differences(old: Path, new: Path) -> bool:
    return bool(tensors_apart(old, new)[1] or layouts_apart(old, new) or losses_apart(old, new, ()))


def _change_value(new: Path) -> None:
    file = new / CHECKPOINT / "adapter_model.safetensors"
    save_file({"a": torch.nextafter(load_file(file)["a"], torch.tensor(2.0))}, file)


def _metrics(old: str, new: str) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        file = root / "run/task/metrics.jsonl"
        file.write_text(file.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    "change",
    [
        _change_value,
        lambda new: (new / CHECKPOINT / "adapter_model.safetensors").unlink(),
        lambda new: (new / "run/task/extra").touch(),
        _metrics("2.0", "2.0001"),
        _metrics("3.0", "3.1"),
        _metrics('"step"', '"at"'),
    ],
)
def test_a_change_of_what_a_run_leaves_is_seen(
    sides: tuple[Path, Path], change: Callable[[Path], object]
) -> None:
    assert tensors_apart(*sides)[0] == 1 and not _differences(*sides)
    change(sides[1])
    assert _differences(*sides)


@pytest.mark.parametrize(
    ("old", "new", "within", "seen"),
    [
        ({"bytes": 100}, {"bytes": 102}, 0.025, False),
        ({"bytes": 100}, {"bytes": 103}, 0.025, True),
        ({"a": [1, "x"]}, {"a": [1, "y"]}, 0.5, True),
        ({"a": [1]}, {"a": [1, 2]}, 0.5, True),
        ({"a": 1}, {"a": 1, "b": 1}, 0.5, True),
        ({"fits": True}, {"fits": False}, 1.0, True),
        ({"planning_s": 1.0}, {"planning_s": 9.0}, 0.0, False),
    ],
)
def test_a_change_of_an_answer_is_seen(old: Any, new: Any, within: float, seen: bool) -> None:
    assert bool(apart(old, new, within)) is seen


def test_answers_lose_what_differs_from_run_to_run() -> None:
    answer = {
        "status": 2,
        "out": "/tmp/x/plan: took 3.5 s\n",
        "err": "by process 17 at 2026-01-02 03:04:05\n",
    }
    assert said(answer, {"/tmp/x": "HERE"}) == {
        "status": 2,
        "out": ["HERE/plan: took N s"],
        "err": ["by process N at TIME"],
    }
