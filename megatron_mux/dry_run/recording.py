"""What a rank allocated and freed, from loading to what follows its last step."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from megatron_mux.memory.stream.events import Stream

STEP = "step"
"""Mark of the start of a step, or of several rolling steps."""

Mark = tuple[int, str]
"""Number of events before something started, and its name."""


@dataclass(frozen=True)
class Recording:
    """What a rank allocated and freed.

    Attributes:
        stream: From the first weight on.
        marks: What the rank was doing: `STEP`, the actions of a step, evaluations. Events before the first step belong
            to loading the backbone and registering tasks.
        communicators: Number of process groups in which this rank exchanged tensors of its device.
    """

    stream: Stream
    marks: tuple[Mark, ...]
    communicators: int = 0

    def at(self, index: int) -> str:
        """What the rank was doing at an event; empty before the first mark."""
        place = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[place - 1][1] if place else ""
