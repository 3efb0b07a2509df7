"""The interface of a tracker: takes the figures of one task's run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a task's run.

    Attributes:
        task: The task's name.
        name: What the run is called.
        project: The project or experiment that it belongs to.
        directory: Where files go.
        known: The tracker's own name of the run that is continued; None: it is a new one.
        step: Optimizer steps done before; later figures in files are dropped, as they will come again.
        config: The task as plain data.
        group: The sweep that it belongs to; empty: none.
    """

    task: str
    name: str
    project: str
    directory: Path
    known: str | None = None
    step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""


class Tracker(ABC):
    """Takes the figures of one task.

    Attributes:
        known: The tracker's own name of the run, by which it continues it; None: it needs none.
    """

    known: str | None = None

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of a step, training's or an evaluation's."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """End the run: `finished` if the task has done its last step, else it may be continued."""
