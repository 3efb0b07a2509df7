"""Pairs of a row and an expert, in the order in which a rank's experts compute them: expert by expert, task by task.

So no row meets another task's adapter, and all pairs of an expert are one product.

Shapes: N rows that a rank's experts compute, K experts of a row, P pairs, W width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """The pairs that a rank computes.

    Attributes:
        rows: `[P]` int64, the row of each pair.
        choices: `[P]` int64, which of its row's K experts each is.
        counts: Pairs of each of the rank's experts.
        groups: For each expert and task with pairs: the expert's place among the rank's, the task's slot, the first of
            their pairs and one past the last.
        places: `[P]` int64, for the pairs in order of rows, where each one is.
        starts: `[N]` int64, the first of each row's pairs in `places`.
    """

    rows: Tensor
    choices: Tensor
    counts: tuple[int, ...]
    groups: tuple[tuple[int, int, int, int], ...]
    places: Tensor
    starts: Tensor

    @classmethod
    def of(cls, experts: Tensor, slots: Tensor, places: Tensor, held: int) -> Pairs:
        """Order the pairs of a rank.

        Args:
            experts: `[N, K]` int64, the experts of each row; -1 is left out.
            slots: `[N]` int64, the slot of each row's task.
            places: `[E + 1]` int64, the place of each expert among those that the rank holds; -1: it does not. The
                last one is -1, so that no expert has none.
            held: How many it holds.
        """
        here = places[experts]
        rows, choices = (here >= 0).nonzero(as_tuple=True)
        most = int(slots.max()) + 1 if len(slots) else 1
        key = here[rows, choices] * most + slots[rows]
        order = key.argsort(stable=True)
        found = torch.empty_like(order)
        found[order] = torch.arange(len(order), device=order.device)
        of_row = (here >= 0).sum(dim=1)
        sizes = torch.bincount(key, minlength=held * most).view(held, most).tolist()
        counts = tuple(map(sum, sizes))
        starts = of_row.cumsum(0) - of_row
        return cls(rows[order], choices[order], counts, tuple(_groups(sizes)), found, starts)

    def spread(self, x: Tensor) -> Tensor:
        """The row of each pair: `[N, W]` to `[P, W]`."""
        spread: Tensor = _Spread.apply(x, self)  # type: ignore[no-untyped-call]
        return spread

    def summed(self, y: Tensor) -> Tensor:
        """The sum of each row's pairs: `[P, W]` to `[N, W]`."""
        summed: Tensor = _Sum.apply(y, self)  # type: ignore[no-untyped-call]
        return summed


def _groups(sizes: list[list[int]]) -> Iterator[tuple[int, int, int, int]]:
    """`Pairs.groups` from the pairs of each expert and slot."""
    at = 0
    for place, of_slot in enumerate(sizes):
        for slot, size in enumerate(of_slot):
            if size:
                yield place, slot, at, at + size
            at += size


def _sum(y: Tensor, pairs: Pairs) -> Tensor:
    if not len(pairs.places):
        return y.new_zeros(len(pairs.starts), y.shape[1])
    # In the same order whatever else there is, which adding to rows in place does not promise on a GPU.
    return F.embedding_bag(pairs.places, y, pairs.starts, mode="sum")


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return x.index_select(0, pairs.rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.pairs), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, pairs: Pairs) -> Tensor:
        ctx.pairs = pairs
        return _sum(y, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.pairs.rows), None
