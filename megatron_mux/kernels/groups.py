"""Which rows of a micro-batch belong to which task, as kernels that compute all tasks at once take them.

Shapes: T rows of the micro-batch, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 64
"""Rows of a tile: kernels compute a group tile by tile, from its own first row on, whatever its neighbours are."""

PART_ROWS = 2048
"""Rows of a part: gradients of weights of a group that has at least two are computed part by part, from its first row
on; the last one takes the rest."""

NO_SLOT = (1 << 20) - 1
"""Of rows that belong to no task: padding, and those that a reference computes."""

Rows = tuple[int, int]
"""First row, and one past the last."""


@dataclass(frozen=True)
class RowGroups:
    """The rows of each task that has any: G groups, in row order, disjoint.

    A task is known by its *slot*: a small integer that it keeps while it is attached, the same on every stage. Tables
    of parameters are indexed by slot, so they change only when tasks come or go.

    Attributes:
        slots: `[G]` the slot of each group's task.
        rows: `[G]` the rows of each group.
        steps: `[G]` optimizer steps that each group's task has done.
        training: False while evaluating: no dropout.
        row_ranges: `[G, 4]` int32 on the device: slot, first row, one past the last row, steps.
        tiles: `[tiles, 3]` int32 on the device: group, first row, one past the last row; see `tiles_of`.
        sequence_ids: `[T]` int32 on the device, the sequence of each row.
        token_index: `[T]` int32 on the device, the token of each row within its sequence.
    """

    slots: tuple[int, ...]
    rows: tuple[Rows, ...]
    steps: tuple[int, ...]
    training: bool
    row_ranges: Tensor
    tiles: Tensor
    sequence_ids: Tensor
    token_index: Tensor

    @cached_property
    def slot_set(self) -> frozenset[int]:
        """The slots, to look them up."""
        return frozenset(self.slots)

    @cached_property
    def slot_of_row(self) -> Tensor:
        """`[T]` int64 on the device: the slot of each row's task, or `NO_SLOT`."""
        row = torch.arange(len(self.sequence_ids), dtype=torch.int32, device=self.row_ranges.device)
        # Behind all groups there is one that no row reaches.
        groups = F.pad(self.row_ranges, (0, 0, 0, 1), value=NO_SLOT)
        group = groups[torch.searchsorted(self.row_ranges[:, 2].contiguous(), row, right=True)]
        return torch.where(row >= group[:, 1], group[:, 0], NO_SLOT).long()

    @cached_property
    def parts(self) -> int:
        """Room for the parts of all groups that are divided; 0 if none is. See `PART_ROWS`."""
        divided = any(stop - start >= 2 * PART_ROWS for start, stop in self.rows)
        return self.rows[-1][1] // PART_ROWS if divided else 0


def tiles_of(rows: Sequence[Rows]) -> Iterator[tuple[int, int, int]]:
    """Yield group, first row and one past the last row of each tile.

    Tiles are counted from a group's own first row: how a task's rows are divided never depends on its neighbours.
    """
    for group, (start, stop) in enumerate(rows):
        for first in range(start, stop, TILE_ROWS):
            yield group, first, min(first + TILE_ROWS, stop)
