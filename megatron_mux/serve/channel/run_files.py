"""Reads what a run leaves in its directory: an instance to report it, the server once an instance has died."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_mux.saved_files import manifests

ENDS = ("finished", "failed", "removed")
"""Statuses of tasks in saves after which their run does nothing for them."""
_LINES_AT_ONCE = 200


@dataclass(frozen=True)
class SavedJob:
    """A task in a save.

    Attributes:
        step: Steps that its checkpoint holds.
        checkpoint: Its directory, absolute; None: it has none of its own yet.
    """

    step: int
    status: str
    reason: str
    checkpoint: Path | None


def newest_save(directory: Path, after: int = 0) -> tuple[int, dict[str, SavedJob]]:
    """The tasks of a run's newest save by their names, and its number; none if that is not above `after`."""
    number, path = max(manifests(directory), default=(0, Path()))
    if number <= after:
        return after, {}
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())["tasks"]
    except FileNotFoundError:  # a newer one has replaced it
        return after, {}
    return number, {entry["name"]: _saved(directory, entry) for entry in entries}


def _saved(directory: Path, entry: dict[str, Any]) -> SavedJob:
    named = str(entry["checkpoint"])
    # An absolute one is that of the run which the task came from.
    own = directory / named if named and not Path(named).is_absolute() else None
    return SavedJob(int(entry["step"]), str(entry["status"]), str(entry["reason"]), own)


def new_lines(directory: Path, task: str, offset: int) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Yield a task's metrics from an offset in their file on, some lines at a time, and the offset behind them."""
    try:
        with open(directory / task / "metrics.jsonl", "rb") as file:
            file.seek(offset)
            text = file.read()
    except FileNotFoundError:
        return
    whole = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)
    for first in range(0, len(whole), _LINES_AT_ONCE):
        some = whole[first : first + _LINES_AT_ONCE]
        offset += sum(map(len, some))
        yield [json.loads(line) for line in some], offset
