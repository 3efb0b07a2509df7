"""Some columns of a matrix: a slice, runs at equal distances, or any; reading and adding to them in few operations.

Columns of a Hugging Face module in a BaseOp's output are a slice, or a run for each key-value group.
Shapes: n rows, N columns of the matrix, c of them meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """Columns of a matrix.

    Attributes:
        start: The first.
        run: Length of a run.
        distance: From the start of a run to that of the next.
        count: Number of runs.
        index: `[c]` int32, where they are no such runs; else None.
    """

    start: int
    run: int
    distance: int
    count: int
    index: Tensor | None = None

    @classmethod
    def of(cls, index: Tensor | None, width: int) -> Columns:
        """The columns of `[c]` indices; all `width` of them for None."""
        if index is None or not index.numel():
            return cls(0, width if index is None else 0, 0, 1)
        places = index.tolist()
        breaks = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
        run = breaks[0] if breaks else len(places)
        count = len(places) // run
        distance = places[run] - places[0] if count > 1 else 0
        runs = [places[0] + i * distance + j for i in range(count) for j in range(run)]
        regular = runs == places and (count == 1 or distance > run)
        return cls(places[0], run, distance, count, None if regular else index)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First column and one past the last of each run, in the order of columns; empty runs are left out."""
        if self.index is not None:
            return tuple((place, place + 1) for place in self.index.tolist())
        starts = (self.start + i * self.distance for i in range(self.count))
        return tuple((start, start + self.run) for start in starts if self.run)

    def take(self, x: Tensor) -> Tensor:
        """`[n, c]` of `[n, N]`: a view if they are a slice."""
        if self.index is not None:
            return x.index_select(1, self.index)
        if self.count == 1:
            return x[:, self.start : self.start + self.run]
        return self._runs(x).reshape(x.shape[0], self.count * self.run)

    def add_(self, x: Tensor, more: Tensor, scale: float) -> None:
        """Add `scale` times `more` `[n, c]` to the columns of `[n, N]`."""
        if self.index is not None:
            x.index_add_(1, self.index, more, alpha=scale)
        elif self.count == 1:
            self.take(x).add_(more, alpha=scale)
        else:
            self._runs(x).add_(more.view(x.shape[0], self.count, self.run), alpha=scale)

    def add_product_(self, x: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
        """Add `scale * a b` `[n, c]` to the columns of `[n, N]`."""
        if self.index is None and self.count == 1:
            self.take(x).addmm_(a, b, alpha=scale)
        else:
            self.add_(x, a @ b, scale)

    def _runs(self, x: Tensor) -> Tensor:
        """`[n, count, run]` view."""
        size, stride = (x.shape[0], self.count, self.run), (x.stride(0), self.distance, 1)
        return x.as_strided(size, stride, x.storage_offset() + self.start)


@lru_cache(maxsize=4096)
def overlap(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> bool:
    """Whether two `Columns.ranges` have a column in common. Modules of all layers and tasks ask for the same few."""
    ends = 0
    for start, stop in sorted((*a, *b)):
        if start < ends:
            return True
        ends = max(ends, stop)
    return False
