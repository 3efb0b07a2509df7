"""What a rank allocated and freed, from loading to what follows its last step."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass

from megatron_mux.memory.stream.events import Stream

STEP = "step"
"""What is begun where a step is, or several that roll."""

Mark = tuple[int, str]
"""How many events there were when something was begun, and what."""


@dataclass(frozen=True)
class Recording:
    """What a rank allocated and freed.

    Attributes:
        stream: From the first weight on.
        marks: What the rank was at: `STEP`, the actions of a step, evaluations; those before the first step loaded the
            backbone and registered the tasks.
        communicators: Groups of ranks that this one has exchanged tensors of its device with.
    """

    stream: Stream
    marks: tuple[Mark, ...]
    communicators: int = 0

    @property
    def begins(self) -> tuple[int, ...]:
        """Events before each step."""
        return tuple(index for index, what in self.marks if what == STEP)

    @property
    def held(self) -> int:
        """Bytes that are there before the first step: weights, adapters, optimizers."""
        return self.stream.live()[self.begins[0] - 1] if self.begins[0] else 0

    @property
    def last_step_peak(self) -> int:
        """The most bytes at once from the last step on."""
        return max(self.stream.live()[max(self.begins[-1] - 1, 0) :], default=0)

    def at(self, index: int) -> str:
        """What the rank was at when an event happened; empty before the first mark."""
        place = bisect_right(self.marks, index, key=lambda mark: mark[0])
        return self.marks[place - 1][1] if place else ""

    def to_json(self) -> str:
        """As one line of text; `from_json` reads it."""
        return f"{json.dumps([self.marks, self.communicators])}\t{self.stream.to_json()}"

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """Read what `to_json` wrote.

        Raises:
            StreamError: Its stream is none.
        """
        head, stream = text.split("\t", 1)
        marks, communicators = json.loads(head)
        return cls(Stream.from_json(stream), tuple((index, what) for index, what in marks), communicators)
