"""What a rank allocated and freed, from loading to its last step."""

from __future__ import annotations

import json
from dataclasses import dataclass

from megatron_mux.memory.stream.events import Stream


@dataclass(frozen=True)
class Recording:
    """What a rank allocated and freed.

    Attributes:
        stream: From the first weight to the end of the last step.
        begins: Events before each step; those before the first loaded the backbone and registered the tasks.
    """

    stream: Stream
    begins: tuple[int, ...]

    @property
    def held(self) -> int:
        """Bytes that are there before the first step: weights, adapters, optimizers."""
        return self.stream.live()[self.begins[0] - 1] if self.begins[0] else 0

    @property
    def last_step_peak(self) -> int:
        """The most bytes at once in the last step."""
        return max(self.stream.live()[max(self.begins[-1] - 1, 0) :], default=0)

    def to_json(self) -> str:
        """As one line of text; `from_json` reads it."""
        return f"{json.dumps(self.begins, separators=(',', ':'))} {self.stream.to_json()}"

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """Read what `to_json` wrote.

        Raises:
            StreamError: Its stream is none.
        """
        begins, stream = text.split(" ", 1)
        return cls(Stream.from_json(stream), tuple(json.loads(begins)))
