"""What a run left, compared bit for bit with what another one left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.end_to_end.harness import assert_same
from tests.end_to_end.workplace import TASKS


def final_checkpoint(directory: Path, task: str) -> Path:
    """The checkpoint of a task's last step."""
    return directory / task / f"checkpoint-{TASKS[task]['training']['max_steps']}"


def metrics(directory: Path, task: str) -> list[dict[str, Any]]:
    """A task's metrics without what depends on the clock."""
    lines = (directory / task / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "wall_s"} for line in lines]


def assert_same_outcome(found: Path, wanted: Path) -> None:
    """The same adapters and training states bit for bit, and the same metrics, each step once."""
    for task in TASKS:
        ours, theirs = final_checkpoint(found, task), final_checkpoint(wanted, task)
        names = sorted(path.name for path in theirs.iterdir())
        assert names == sorted(path.name for path in ours.iterdir())
        for name in names:
            assert_same_file(ours / name, theirs / name)
        assert metrics(found, task) == metrics(wanted, task), task


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
