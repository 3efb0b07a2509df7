"""Pairs of a row and an expert, in the order in which a rank's experts compute them: expert by expert, task by task.

So no row meets another task's adapter, and all pairs of an expert are one product. The host knows how many pairs there
are before they are ordered, and reads nothing.

Shapes: N rows that a rank's experts compute, K experts of a row, P pairs, W width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.experts.groups import SLOTS, ExpertGroups


@dataclass(frozen=True)
class ExpertPermutation:
    """The pairs that a rank computes.

    Attributes:
        rows: `[P]` int64, the row of each pair.
        order: `[P]` int64, which of the N K choices of all rows each is.
        groups: Their experts and tasks.
        places: `[P]` int64, for the pairs in order of rows, where each one is.
        starts: `[N]` int64, the first of each row's pairs in `places`.
    """

    rows: Tensor
    order: Tensor
    groups: ExpertGroups
    places: Tensor
    starts: Tensor

    @classmethod
    def of(
        cls,
        experts: Tensor,
        slots: Tensor,
        places: Tensor,
        held: int,
        count: int,
        known_slots: frozenset[int] | None = None,
    ) -> ExpertPermutation:
        """Order the pairs of a rank.

        Args:
            experts: `[N, K]` int64, the experts of each row; -1 is left out.
            slots: `[N]` int64, the slot of each row's task.
            places: `[E + 1]` int64, the place of each expert among those that the rank holds; -1: it does not. The
                last one is -1, so that no expert has none.
            count: P.
            known_slots: The slots that the rows may have, if the host knows them.
        """
        assert (held + 1) * SLOTS < 1 << 31, "more experts on a rank than keys of 32 bits tell apart"
        here = places[experts]
        computed = here >= 0
        of_row = computed.sum(dim=1)
        # Choices that are not computed here come last.
        keys = torch.where(computed, here * SLOTS + slots.unsqueeze(1), held * SLOTS).int().flatten()
        keys, order = keys.sort(stable=True)
        if count == experts.numel():
            found = torch.empty_like(order)
            found[order] = torch.arange(count, device=order.device)
        else:
            keys, order = keys[:count].clone(), order[:count].clone()  # the rest is freed
            found = order.argsort()
        starts = of_row.cumsum(0) - of_row
        rows = order.div(experts.shape[1], rounding_mode="floor")
        return cls(rows, order, ExpertGroups(keys, held, known_slots), found, starts)

    def spread(self, x: Tensor) -> Tensor:
        """The row of each pair: `[N, W]` to `[P, W]`."""
        spread: Tensor = _Spread.apply(x, self)  # type: ignore[no-untyped-call]
        return spread

    def of_choices(self, weights: Tensor) -> Tensor:
        """What belongs to each pair, of something that all choices have: `[N, K]` to `[P]`."""
        return weights.flatten().index_select(0, self.order)

    def summed(self, y: Tensor) -> Tensor:
        """The sum of each row's pairs: `[P, W]` to `[N, W]`."""
        summed: Tensor = _Sum.apply(y, self)  # type: ignore[no-untyped-call]
        return summed


def sum_of_places(y: Tensor, places: Tensor, starts: Tensor) -> Tensor:
    """Sum rows of `y` `[P, W]`: for each of N places in `starts`, those listed from there on.

    In the same order whatever else there is, which adding to rows in place does not promise on a GPU.
    """
    if not len(places):
        return y.new_zeros(len(starts), y.shape[1])
    return F.embedding_bag(places, y, starts, mode="sum")


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: ExpertPermutation) -> Tensor:
        ctx.pairs = pairs
        return x.index_select(0, pairs.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_of_places(gradient, ctx.pairs.places, ctx.pairs.starts), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, pairs: ExpertPermutation) -> Tensor:
        ctx.pairs = pairs
        return sum_of_places(y, pairs.places, pairs.starts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.pairs.rows), None
