"""A step's instants at which memory may be at its highest: sums of parts that are constants and so many bytes a row.

Shapes: T rows (tokens) of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

PARTS = (
    "parameters",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "workspace",
    "communication",
    "fragmentation",
    "context",
)
"""What memory is for. `activations`: what passes keep, autocast's copies of weights among it; `communication`: weights
gathered or copied for use, gradients copied to be summed; `fragmentation`: held by the allocator, used by nothing;
`context`: beside the allocator's."""


class Line(NamedTuple):
    """A part's bytes at an instant: `fixed + per_row * min(T, most)`, and nothing a row for at most `few` of them."""

    part: str
    fixed: float
    per_row: float = 0.0
    most: float = math.inf
    few: int = 0

    def bytes(self, rows: float) -> float:
        """For so many rows."""
        return self.fixed + self.per_row * min(rows, self.most) * (rows > self.few)


@dataclass(frozen=True)
class Instant:
    """When memory may be at its highest.

    Attributes:
        name: In words.
        stage: Of the pipeline.
        lines: What there is; a part may have several.
    """

    name: str
    stage: int
    lines: tuple[Line, ...]

    def bytes(self, rows: float) -> float:
        """All of it."""
        fixed, per_row, limited = self._sums
        return fixed + per_row * rows + sum(line.bytes(rows) for line in limited)

    @cached_property
    def _sums(self) -> tuple[float, float, list[Line]]:
        """The lines as one, and those that begin or end somewhere: a batch is searched for by many questions."""
        limited = [line for line in self.lines if line.most < math.inf or line.few]
        free = [line for line in self.lines if not (line.most < math.inf or line.few)]
        return sum(line.fixed for line in free), sum(line.per_row for line in free), limited

    def breakdown(self, rows: float) -> dict[str, int]:
        """By part."""
        found = dict.fromkeys(PARTS, 0.0)
        for line in self.lines:
            found[line.part] += line.bytes(rows)
        return {part: math.ceil(size) for part, size in found.items()}
