"""Which rows belong to which expert and task, on the device: kernels find their work there, and the host need not know.

Rows are pairs of a token and an expert, ordered by expert and then by task.

Shapes: P rows, E experts that a rank holds, S slots of tasks, G = E S groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_mux.kernels.groups import NO_SLOT, RowGroups

SLOTS = NO_SLOT + 1
"""More than slots of tasks: a row's key is the place of its expert times this, plus its slot."""


class Tiles(NamedTuple):
    """Groups of rows, divided into tiles of equally many rows, each group from its own first row on.

    Attributes:
        group: `[tiles]` int32, the group of each tile; G: there is no such tile.
        start: `[G]` int32, the first row of each group.
        stop: `[G]` int32, one past its last.
        last: `[G]` int32, tiles of all groups up to this one.
    """

    group: Tensor
    start: Tensor
    stop: Tensor
    last: Tensor

    @classmethod
    def of(cls, start: Tensor, stop: Tensor, rows: int, size: int) -> Tiles:
        """Divide groups of `rows` rows in all into tiles of `size`. As many tiles are laid out as there can be."""
        last = (stop - start).add_(size - 1).div_(size, rounding_mode="floor").cumsum(0, dtype=torch.int32)
        most = rows // size + min(len(start), rows)
        number = torch.arange(most, dtype=torch.int32, device=start.device)
        return cls(torch.searchsorted(last, number, right=True, out_int32=True), start, stop, last)


@dataclass(frozen=True)
class ExpertGroups:
    """The rows of each expert and task.

    Attributes:
        keys: `[P]` int32, ascending: `SLOTS` times the place of a row's expert among those held, plus its slot.
        held: E.
        slots: The slots that rows may have, where the host knows them; None: any.
    """

    keys: Tensor
    held: int
    slots: frozenset[int] | None = None

    @cached_property
    def ends(self) -> Tensor:
        """`[E]` int32, one past the last row of each expert."""
        places = torch.arange(
            SLOTS, (self.held + 1) * SLOTS, SLOTS, dtype=torch.int32, device=self.keys.device
        )
        return torch.searchsorted(self.keys, places, out_int32=True)

    @cached_property
    def sizes(self) -> Tensor:
        """`[E]` int32, rows of each expert, on the device."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    @cached_property
    def _tiles(self) -> dict[tuple[int, int], Tiles]:
        return {}

    def tiles(self, size: int) -> Tiles:
        """Tiles of the rows of each expert."""
        if (0, size) not in self._tiles:
            start = torch.cat((self.ends.new_zeros(1), self.ends[:-1]))
            self._tiles[0, size] = Tiles.of(start, self.ends, len(self.keys), size)
        return self._tiles[0, size]

    def tiles_of_tasks(self, bounds: Tensor, size: int) -> Tiles:
        """Tiles of the rows of each expert and task: group `place * S + slot`.

        Args:
            bounds: `[2, G]` int32, the smallest key of each group, and one past the largest.
            size: Rows of a tile.
        """
        of = bounds.shape[1], size
        if of not in self._tiles:
            start, stop = torch.searchsorted(self.keys, bounds, out_int32=True)
            self._tiles[of] = Tiles.of(start, stop, len(self.keys), size)
        return self._tiles[of]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert. The host reads them."""
        ends = self.ends.tolist()
        return tuple(stop - start for start, stop in zip([0, *ends], ends, strict=False))

    @cached_property
    def groups(self) -> tuple[tuple[int, int, int, int], ...]:
        """For each expert and task with rows: place, slot, first row and one past the last. The host reads them."""
        if not len(self.keys):
            return ()
        slots = self.keys % SLOTS
        most = int(slots.masked_fill(slots == NO_SLOT, -1).max()) + 1
        bounds = bounds_of(self.held, most, self.keys.device)
        starts, stops = torch.searchsorted(self.keys, bounds).tolist()
        return tuple(
            (group // most, group % most, start, stop)
            for group, (start, stop) in enumerate(zip(starts, stops, strict=True))
            if start < stop
        )

    @cached_property
    def rows(self) -> RowGroups:
        """The groups for kernels that compute one after the other: group `slot * E + place`. The host reads them."""
        nothing = torch.empty(0, dtype=torch.int32, device=self.keys.device)
        return RowGroups(
            slots=tuple(slot * self.held + place for place, slot, _, _ in self.groups),
            rows=tuple((start, stop) for _, _, start, stop in self.groups),
            steps=(0,) * len(self.groups),
            training=False,  # which matters for dropout only
            row_ranges=nothing,
            tiles=nothing,
            sequence_ids=nothing,
            token_index=nothing,
        )


def bounds_of(held: int, slots: int, device: torch.device) -> Tensor:
    """`[2, G]` int32: the smallest key of each expert and slot, and one past the largest; group `place * S + slot`."""
    places = torch.arange(0, held * SLOTS, SLOTS, dtype=torch.int32, device=device)
    first = (places.unsqueeze(1) + torch.arange(slots, dtype=torch.int32, device=device)).flatten()
    return torch.stack((first, first + 1))
