"""Products of row groups with a small matrix each: the arithmetic of fused ("horizontal") LoRA adapters.

Rows of one task are one contiguous range of the token axis and meet that task's matrices only: no row is multiplied
with, or added to, another group's values, not even zeros, so a group's NaN stays its own. (A masked block-diagonal
product would be one call too, but 0 x NaN is NaN.)

Two implementations of three products. `LoopProducts` calls BLAS once per group and writes results in place; it is
exact in every dtype. `StackedProducts` makes one `torch.nn.functional.grouped_mm` of all groups, at the price of
padding ranks and of a temporary; it does not take fp64. On CPU the loop was as fast or faster for two to eight groups
at every shape tried, so `choose` takes the stacked form only on a GPU and for enough groups to matter.

Shapes: T rows of the batch, n rows that belong to groups, G groups, R rank, K and N widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

Rows = tuple[tuple[int, int], ...]  # (start, stop) of each group, in row order, disjoint

_RANK_MULTIPLE = 8  # grouped_mm wants strides of whole 16 bytes
_STACK_FROM_GROUPS = 8


class Products(ABC):
    """The three products. `rows` are the groups' ranges; `h` is compact: `[n, R max]`, group after group."""

    @staticmethod
    @abstractmethod
    def project(x: Tensor, rows: Rows, weights: Sequence[Tensor]) -> Tensor:
        """Down: `x[rows of g] @ weights[g].T`.

        Args:
            x: `[T, K]`.
            rows: The groups.
            weights: `[R_g, K]` each.

        Returns:
            `[n, R max]`; columns beyond a group's own rank are unspecified.
        """

    @staticmethod
    @abstractmethod
    def expand_(y: Tensor, rows: Rows, h: Tensor, weights: Sequence[Tensor], scales: Sequence[float]) -> None:
        """Up, in place: `y[rows of g] += scales[g] * h_g @ weights[g].T`.

        Args:
            y: `[T, N]`, changed.
            rows: The groups.
            h: From `project`.
            weights: `[N, R_g]` each.
            scales: A factor per group.
        """

    @staticmethod
    @abstractmethod
    def outer(
        h: Tensor, x: Tensor, rows: Rows, ranks: Sequence[int], scales: Sequence[float]
    ) -> list[Tensor]:
        """Weight gradients: `scales[g] * h_g.T @ x[rows of g]`.

        Args:
            h: `[n, R max]`, compact.
            x: `[T, K]`.
            rows: The groups.
            ranks: R of each group.
            scales: A factor per group.

        Returns:
            `[R_g, K]` each.
        """


class LoopProducts(Products):
    """One BLAS call per group, into place. Exact in every dtype; the reference for the other."""

    @staticmethod
    def project(x: Tensor, rows: Rows, weights: Sequence[Tensor]) -> Tensor:
        """See `Products.project`."""
        if len(rows) == 1:
            start, stop = rows[0]
            return x[start:stop] @ weights[0].t()
        h = x.new_empty(sum(stop - start for start, stop in rows), max(w.shape[0] for w in weights))
        at = 0
        for (start, stop), weight in zip(rows, weights, strict=True):
            torch.mm(x[start:stop], weight.t(), out=h[at : at + stop - start, : weight.shape[0]])
            at += stop - start
        return h

    @staticmethod
    def expand_(y: Tensor, rows: Rows, h: Tensor, weights: Sequence[Tensor], scales: Sequence[float]) -> None:
        """See `Products.expand_`."""
        at = 0
        for (start, stop), weight, scale in zip(rows, weights, scales, strict=True):
            y[start:stop].addmm_(h[at : at + stop - start, : weight.shape[1]], weight.t(), alpha=scale)
            at += stop - start

    @staticmethod
    def outer(
        h: Tensor, x: Tensor, rows: Rows, ranks: Sequence[int], scales: Sequence[float]
    ) -> list[Tensor]:
        """See `Products.outer`."""
        results = []
        at = 0
        for (start, stop), rank, scale in zip(rows, ranks, scales, strict=True):
            product = h[at : at + stop - start, :rank].t() @ x[start:stop]
            results.append(product if scale == 1.0 else product.mul_(scale))
            at += stop - start
        return results


class StackedProducts(Products):
    """One grouped matrix product for all groups: ranks are padded with zeros of the group's own."""

    @staticmethod
    def project(x: Tensor, rows: Rows, weights: Sequence[Tensor]) -> Tensor:
        """See `Products.project`."""
        stack = _stack(weights, [1.0] * len(weights))  # [G, R, K]
        pieces = [
            torch.nn.functional.grouped_mm(x[start:stop], stack[first:last].transpose(1, 2), offs=ends)
            for start, stop, first, last, ends in _runs(rows, x.device)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    @staticmethod
    def expand_(y: Tensor, rows: Rows, h: Tensor, weights: Sequence[Tensor], scales: Sequence[float]) -> None:
        """See `Products.expand_`."""
        stack = _stack([w.t() for w in weights], scales)  # [G, R, N]
        at = 0
        for start, stop, first, last, ends in _runs(rows, y.device):
            part = h[at : at + stop - start]
            y[start:stop] += torch.nn.functional.grouped_mm(part, stack[first:last], offs=ends)
            at += stop - start

    @staticmethod
    def outer(
        h: Tensor, x: Tensor, rows: Rows, ranks: Sequence[int], scales: Sequence[float]
    ) -> list[Tensor]:
        """See `Products.outer`."""
        products: list[Tensor] = []
        at = 0
        for start, stop, _, _, ends in _runs(rows, x.device):
            part = h[at : at + stop - start]
            products += torch.nn.functional.grouped_mm(part.t(), x[start:stop], offs=ends).unbind(0)
            at += stop - start
        return [p[:rank] * scale for p, rank, scale in zip(products, ranks, scales, strict=True)]


def choose(x: Tensor, rows: Rows) -> type[Products]:
    """The implementation to use for groups `rows` of `x`."""
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and len(rows) >= _STACK_FROM_GROUPS:
        return StackedProducts
    return LoopProducts


def _stack(weights: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """`[G, R max, K]` from `[R_g, K]` each, the rank padded with zeros to a multiple of `_RANK_MULTIPLE`."""
    rank = max(w.shape[0] for w in weights)
    rank += -rank % _RANK_MULTIPLE
    stack = weights[0].new_zeros(len(weights), rank, weights[0].shape[1])
    for place, weight, scale in zip(stack, weights, scales, strict=True):
        torch.mul(weight, scale, out=place[: weight.shape[0]])
    return stack


@lru_cache(maxsize=64)
def _runs(rows: Rows, device: torch.device) -> tuple[tuple[int, int, int, int, Tensor], ...]:
    """Stretches of adjoining groups: (first row, last row, first group, last group, each group's end in the stretch).

    Cached, since all BaseOps of a micro-batch need the same, and the ends have to be copied to the device.
    """
    runs = []
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i][0] != rows[i - 1][1]:
            start, stop = rows[first][0], rows[i - 1][1]
            ends = torch.tensor([r[1] - start for r in rows[first:i]], dtype=torch.int32, device=device)
            runs.append((start, stop, first, i, ends))
            first = i
    return tuple(runs)
