"""Bottlenecks and factors (IA3) of many tasks on single rows: a few launches, however many tasks there are.

They act on what a BaseOp gets or on what it has finished, not on its product. As in `low_rank`, every operation works
on the rows of each group alone: a task's NaN stays its own. A row of a task without a term is copied, never multiplied.

Shapes: T rows, N their width, R rank of a bottleneck, W latent columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.product import LowRankKernels
from megatron_mux.kernels.low_rank.terms import Term, TermTable

LAUNCHES = {"activated": 1, "activation_gradient_": 1, "scale_": 1, "factor_gradients": 1}
"""Device launches of each operation by Triton kernels at most, however many tasks there are."""


class GroupedKernels(LowRankKernels):
    """Kernels that compute all tasks at once, those with bottlenecks and factors too.

    The operations on a bottleneck's A and B are those of `LowRankKernels`, with the row's values in the place of x:
    `up_` adds its bias, `weight_gradients` the gradients of both biases.
    """

    @staticmethod
    @abstractmethod
    def activated(latent: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """`activation(latent + down_bias)` of each bottleneck, in its columns of a new `[T, W]`."""

    @staticmethod
    @abstractmethod
    def activation_gradient_(d_latent: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """Multiply `d_latent` by the derivative of each activation at `latent + down_bias`, in place.

        Returns:
            What `activated` returns for `latent`.
        """

    @staticmethod
    @abstractmethod
    def scale_(values: Tensor, table: TermTable, groups: RowGroups) -> None:
        """Multiply each term's columns of `[T, N]` by its factors, in the rows of its task, in place."""

    @staticmethod
    @abstractmethod
    def factor_gradients(values: Tensor, gradient: Tensor, table: TermTable, groups: RowGroups) -> None:
        """Add the sum over rows of `values * gradient`, both `[T, N]`, to the gradients of each term's factors."""


class RowTables(NamedTuple):
    """What tasks do to the rows of one tensor; a task is in one table only.

    Attributes:
        factors: Terms of rank 0.
        bottlenecks: Terms with `Term.activation`.
    """

    factors: TermTable
    bottlenecks: TermTable

    @classmethod
    def of(cls, terms: Sequence[Term]) -> RowTables:
        """The tables of these terms."""
        parts = ([term for term in terms if (term.activation is not None) == on] for on in (False, True))
        return cls(*map(TermTable, parts))

    def any_of(self, groups: RowGroups) -> bool:
        """Whether some task with rows in a micro-batch does something."""
        return any(table.any_of(groups) for table in self)


class _AdaptedRows(torch.autograd.Function):
    """All tasks, with one backward. Only the values and the latent tensor are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        anchor: Tensor,
        tables: RowTables,
        groups: RowGroups,
        kernels: type[GroupedKernels],
    ) -> Tensor:
        out, latent = values.clone(memory_format=torch.contiguous_format), None
        if tables.factors.any_of(groups):
            kernels.scale_(out, tables.factors, groups)
        if tables.bottlenecks.any_of(groups):
            latent = kernels.down(values, tables.bottlenecks, groups)
            kernels.up_(
                out, kernels.activated(latent, tables.bottlenecks, groups), tables.bottlenecks, groups
            )
        ctx.save_for_backward(values, latent)
        ctx.tables, ctx.groups, ctx.kernels = tables, groups, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, latent = ctx.saved_tensors
        tables, groups, kernels = ctx.tables, ctx.groups, ctx.kernels
        gradient = gradient.contiguous()
        back = gradient.clone() if ctx.needs_input_grad[0] else None
        if tables.factors.any_of(groups):
            kernels.factor_gradients(values, gradient, tables.factors, groups)
            if back is not None:
                kernels.scale_(back, tables.factors, groups)
        if latent is not None:
            table = tables.bottlenecks
            d_latent = kernels.latent_gradient(gradient, table, groups)
            hidden = kernels.activation_gradient_(d_latent, latent, table, groups)
            kernels.weight_gradients(values, hidden, gradient, d_latent, table, groups)
            if back is not None:
                kernels.input_gradient_(back, d_latent, table, groups)
        return back, None, None, None, None


def adapt_rows(
    values: Tensor, anchor: Tensor, tables: RowTables, groups: RowGroups, kernels: type[GroupedKernels]
) -> Tensor:
    """Compute each task's bottleneck or factors on its rows. The backward pass adds to the terms' gradients.

    Args:
        values: `[T, N]`.
        anchor: See `low_rank.product.low_rank_linear`.

    Returns:
        A new `[T, N]`; rows without a term are copies.
    """
    result: Tensor = _AdaptedRows.apply(values, anchor, tables, groups, kernels)  # type: ignore[no-untyped-call]
    return result
