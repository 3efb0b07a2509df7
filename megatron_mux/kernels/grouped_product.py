"""Products of rows with the frozen matrix of their group: a matrix for each expert.

Shapes: P rows, in order of their groups, E groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply each row with the transposed matrix of its group.

    Args:
        x: `[P, in]`.
        weight: `[E, out, in]`, frozen.
        counts: Rows of each of the E groups.

    Returns:
        `[P, out]`, differentiable with respect to `x`.
    """
    product: Tensor = _GroupedProduct.apply(x, weight, tuple(counts))  # type: ignore[no-untyped-call]
    return product


def multiply(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """`grouped_product` without a gradient."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for group, rows in rows_of(counts):
        torch.mm(x[rows], weight[group].t(), out=y[rows])
    return y


def rows_of(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The groups that have rows, and which."""
    for group, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        if start < stop:
            yield group, slice(start, stop)


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.counts = counts
        return multiply(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return multiply(dy, weight.transpose(1, 2), ctx.counts), None, None
