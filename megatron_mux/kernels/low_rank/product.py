"""The low-rank terms of many tasks around a frozen product, as grouped operations: one interface, several kernels.

MuxTune section 4: adapters of all tasks are computed by a few launches, however many tasks there are. Every operation
works on the rows of each group alone: rows of other groups, and rows of none, are neither read nor written, so a task's
NaN stays its own.

Shapes: T rows, K and N width of the product's input and output, R rank of a term, n its columns, W latent columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.terms import TermTable

LAUNCHES = {
    "down": 1,
    "up_": 1,
    "latent_gradient": 1,
    "input_gradient_": 1,
    "weight_gradients": 2,
    "add_parts_": 1,
}
"""Device launches of each operation by Triton kernels at most, however many tasks there are.

`add_parts_` is part of `weight_gradients`, for tasks whose rows are divided (`groups.PART_ROWS`).
"""

RANK_BLOCK = 64
"""Ranks of a block of `weight_gradients`."""

DIVIDED_WIDTH = 8192
"""Products no wider than this are divided over rows: wider ones give a GPU enough blocks as they are."""


class LowRankKernels(ABC):
    """The five operations around a frozen product. See `terms.Term` for what a term computes.

    All take `x` `[T, K]`, the product's input, `y` `[T, N]` its output, gradients of their shapes, and `[T, W]` latent
    tensors, in which what belongs to no term is unspecified; the terms, and the rows of each task.
    """

    @staticmethod
    @abstractmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """The latent tensor: `dropout(x) A^T` of each term, in its latent columns, before the factors d."""

    @staticmethod
    @abstractmethod
    def up_(y: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """Add `scale * b * ((d * latent) B^T)` of each term to its rows and columns of `y`, in place."""

    @staticmethod
    @abstractmethod
    def latent_gradient(dy: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """The gradient of `d * latent`: `scale * (b * dy) B` of each term."""

    @staticmethod
    @abstractmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """Add `dropout((d * d_latent) A)` of each term to its rows of `dx`, in place, with the same mask.

        `d_latent` is what `latent_gradient` returns.
        """

    @staticmethod
    @abstractmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups
    ) -> None:
        """Add the gradients of A and B, or of the factors, to where the terms keep them.

        `(d * d_latent)^T dropout(x)` and `scale * (b * dy)^T (d * latent)`; of the factors, the sum over rows of
        `d_latent * latent` and of `scale * dy * ((d * latent) B^T)`.
        """


def partials_of(values: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
    """Room for weight gradients of parts of tasks' rows, of all terms: `[parts * terms * N, ranks]` fp32.

    Which tasks are divided is up to their own rows, so that their bits do not depend on neighbours. Terms with biases
    are not.

    Args:
        values: `[T, N]`, x or dy.
    """
    width = values.shape[1]
    divided = width <= DIVIDED_WIDTH and not table.has_biases
    ranks = -(-table.largest_rank // RANK_BLOCK) * RANK_BLOCK
    parts = groups.parts if divided else 0
    return values.new_empty(parts * table.most_terms * width, ranks, dtype=torch.float32)


class _LowRankLinear(torch.autograd.Function):
    """A frozen product and the terms of all tasks, with one backward. Only its input and the latent tensor are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        table: TermTable,
        groups: RowGroups,
        kernels: type[LowRankKernels],
    ) -> Tensor:
        y = F.linear(x, weight, bias)
        latent = kernels.down(x, table, groups)
        kernels.up_(y, latent, table, groups)
        ctx.save_for_backward(weight, x, latent)
        ctx.table, ctx.groups, ctx.kernels = table, groups, kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, latent = ctx.saved_tensors
        table, groups, kernels = ctx.table, ctx.groups, ctx.kernels
        dy = dy.contiguous()
        d_latent = kernels.latent_gradient(dy, table, groups)
        kernels.weight_gradients(x, latent, dy, d_latent, table, groups)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = dy @ weight
            kernels.input_gradient_(dx, d_latent, table, groups)
        return dx, None, None, None, None, None, None


def low_rank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    anchor: Tensor,
    table: TermTable,
    groups: RowGroups,
    kernels: type[LowRankKernels],
) -> Tensor:
    """`x W^T + b`, with the terms of each task added to its rows. The backward pass adds to the terms' gradients.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, frozen.
        bias: `[N]`, frozen, or None.
        anchor: A scalar that requires a gradient, and gets none: so that there is a backward pass if `x` needs none.

    Returns:
        `[T, N]`.
    """
    result: Tensor = _LowRankLinear.apply(x, weight, bias, anchor, table, groups, kernels)  # type: ignore[no-untyped-call]
    return result
