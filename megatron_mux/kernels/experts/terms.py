"""The LoRAs of all tasks at one BaseOp of routed experts, as kernels take them.

A task has an A and a B for each expert, in the layout of `peft`: those of one expert after the other in one `[E R, K]`;
and all in one `[N, R E]`, whose column `r E + e` is column r of expert e.

Shapes: K and N input and output width of an expert, R rank, S slots of tasks, H experts that this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_mux.kernels.experts.groups import ExpertGroups, bounds_of
from megatron_mux.kernels.low_rank.terms import LATENT_MULTIPLE, Term, TermTable, address, bits
from megatron_mux.runtime import to_device

FIELDS = ("down", "up", "down_gradient", "up_gradient", "rank", "experts", "scale")
"""Columns of `ExpertTable.entries`: addresses, sizes, and the bits of an fp64 number."""


@dataclass(frozen=True)
class ExpertTerm:
    """The LoRAs of one task.

    Attributes:
        rank: R.
        down: `[E R, K]` in the dtype of the computation.
        up: `[N, R E]` likewise.
        down_gradient, up_gradient: Like them, in the dtype of parameters: gradients are added here.
        at: Which of the E experts each of the H held ones is.
    """

    slot: int
    rank: int
    down: Tensor
    up: Tensor
    down_gradient: Tensor
    up_gradient: Tensor
    scale: float
    at: tuple[int, ...]

    @property
    def experts(self) -> int:
        """E."""
        return int(self.down.shape[0]) // self.rank

    def terms(self) -> Iterator[Term]:
        """One for each expert that is held, with a slot of its own: `slot * H + place`."""
        down, down_gradient = (m.view(-1, self.rank, m.shape[1]) for m in (self.down, self.down_gradient))
        up, up_gradient = (m.view(m.shape[0], self.rank, -1) for m in (self.up, self.up_gradient))
        for place, expert in enumerate(self.at):
            yield Term(
                self.slot * len(self.at) + place,
                down[expert],
                up[:, :, expert],
                self.scale,
                down_gradient=down_gradient[expert],
                up_gradient=up_gradient[:, :, expert],
            )

    def entry(self) -> list[int]:
        """A row of `ExpertTable.entries`."""
        tensors = self.down, self.up, self.down_gradient, self.up_gradient
        assert all(tensor.is_contiguous() for tensor in tensors)
        return [*map(address, tensors), self.rank, self.experts, bits(self.scale)]


class ExpertTable:
    """The LoRAs of all tasks; made anew when a task comes or goes, or experts move.

    Args:
        terms: One of each task.
        held: H.
        device: Where the tasks are.

    Attributes:
        slots: S.
        width: Latent columns of a row: the largest rank, rounded up so that rows are aligned.
    """

    def __init__(self, terms: Sequence[ExpertTerm], held: int, device: torch.device) -> None:
        self._terms = {term.slot: term for term in terms} if held else {}
        self.held, self._device = held, device
        self.slots = max(self._terms, default=-1) + 1
        self.largest_rank = max((term.rank for term in self._terms.values()), default=0)
        self.width = -(-self.largest_rank // LATENT_MULTIPLE) * LATENT_MULTIPLE

    def any_of(self, groups: ExpertGroups) -> bool:
        """Whether some row may belong to a task that has adapters here."""
        return bool(self._terms) and (groups.slots is None or not groups.slots.isdisjoint(self._terms))

    @cached_property
    def entries(self) -> Tensor:
        """`[S, len(FIELDS)]` int64 on the device; rank 0 for slots without a task."""
        none = [0] * len(FIELDS)
        rows = [self._terms[slot].entry() if slot in self._terms else none for slot in range(self.slots)]
        return to_device(torch.tensor(rows, dtype=torch.int64), self._device)

    @cached_property
    def at(self) -> Tensor:
        """`[S, H]` int32 on the device: which of a task's experts each held one is."""
        none = (0,) * self.held
        rows = [self._terms[slot].at if slot in self._terms else none for slot in range(self.slots)]
        return to_device(torch.tensor(rows, dtype=torch.int32), self._device)

    @cached_property
    def bounds(self) -> Tensor:
        """See `ExpertGroups.tiles_of_tasks`."""
        return to_device(bounds_of(self.held, self.slots, torch.device("cpu")), self._device)

    def bring(self) -> None:
        """Copy the table to the device, unless it is there, so that the first launch has nothing to prepare."""
        if self._terms:
            _ = self.entries, self.at, self.bounds

    @cached_property
    def loops(self) -> TermTable:
        """For kernels that compute one group after the other: a term for each task and expert."""
        return TermTable([each for term in self._terms.values() for each in term.terms()])
