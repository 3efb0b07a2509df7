"""What a run left, compared bit for bit with what another one left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.end_to_end.harness import assert_close, assert_same
from tests.end_to_end.workplace import TASKS


def final_checkpoint(directory: Path, task: str) -> Path:
    """The checkpoint of a task's last step."""
    return directory / task / f"checkpoint-{TASKS[task]['training']['max_steps']}"


def metrics(directory: Path, task: str) -> list[dict[str, Any]]:
    """A task's metrics without what depends on the clock."""
    lines = (directory / task / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "wall_s"} for line in lines]


def saved_together(directory: Path) -> bool:
    """Whether the newest save names states of one moment: tasks that are not over at the same step, others before it.

    Else a resume computes some steps with other neighbours than before, and gives the same to rounding.
    """
    manifests = sorted(directory.glob("manifests/*.json"))
    tasks = json.loads(manifests[-1].read_text())["tasks"] if manifests else []
    running = {task["step"] for task in tasks if task["status"] == "running"}
    return len(running) < 2 and all(task["step"] <= min(running, default=task["step"]) for task in tasks)


def assert_same_outcome(found: Path, wanted: Path, exact: bool = True) -> None:
    """The same adapters, training states and metrics, bit for bit or to rounding; each step once."""
    for task in TASKS:
        ours, theirs = final_checkpoint(found, task), final_checkpoint(wanted, task)
        names = sorted(path.name for path in theirs.iterdir())
        assert names == sorted(path.name for path in ours.iterdir())
        for name in names:
            if exact:
                assert_same_file(ours / name, theirs / name)
            elif name.endswith(".safetensors"):
                assert_close(load_file(ours / name), load_file(theirs / name), 1e-5, str(ours / name))
        for line, other in zip(metrics(found, task), metrics(wanted, task), strict=True):
            assert line == (other if exact else pytest.approx(other, rel=1e-5)), task


def assert_same_file(found: Path, wanted: Path) -> None:
    """The same content; tensors bit for bit (their file's metadata has no fixed order)."""
    if found.suffix == ".safetensors":
        assert_same(load_file(found), load_file(wanted), str(found))
    else:
        ours, theirs = ([*_undated(file)] for file in (found, wanted))
        assert ours == theirs, found


def _undated(file: Path) -> Iterator[bytes]:
    """The lines of a file, without the date of a model card."""
    yield from (line for line in file.read_bytes().splitlines() if not line.startswith(b"- Date: "))
