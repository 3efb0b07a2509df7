"""Products of routed experts with the LoRAs of all tasks and experts: one interface, several kernels.

Every operation works on the rows of one expert and task alone: a task's NaN stays its own.

Shapes: P rows, ordered by expert and task, K and N input and output width, W latent columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from megatron_mux.kernels.expert_groups import ExpertGroups
from megatron_mux.kernels.expert_terms import ExpertTable
from megatron_mux.kernels.grouped_product import multiply
from megatron_mux.kernels.loop_low_rank import LoopKernels
from megatron_mux.kernels.low_rank_choice import KernelName, has_triton, suits_triton

TILE_ROWS = 32
"""Rows of a tile of one expert and task: they are few."""

LAUNCHES = {"down": 1, "up_": 1, "latent_gradient": 1, "input_gradient_": 1, "weight_gradients": 2}
"""Device launches of each operation by Triton kernels at most, besides those that lay out tiles."""


class ExpertKernels(ABC):
    """The operations around a product; those of `LowRankKernels`, for an expert and task each."""

    @staticmethod
    @abstractmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """`[P, W]`: `x A^T` of each row's expert and task; columns beyond its rank are unspecified."""

    @staticmethod
    @abstractmethod
    def up_(y: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """Add `scale * latent B^T` to `y` `[P, N]`, in place."""

    @staticmethod
    @abstractmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """`[P, W]`: `scale * dy B`."""

    @staticmethod
    @abstractmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """Add `d_latent A` to `dx` `[P, K]`, in place."""

    @staticmethod
    @abstractmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups
    ) -> None:
        """Add `d_latent^T x` and `scale * dy^T latent` to where the terms keep the gradients of A and B."""


class LoopExpertKernels(ExpertKernels):
    """Group by group: exact in every dtype, on every device, the reference. The host reads the groups."""

    @staticmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.down`."""
        return LoopKernels.down(x, table.loops, groups.rows)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.up_`."""
        LoopKernels.up_(y, latent, table.loops, groups.rows)

    @staticmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.latent_gradient`."""
        return LoopKernels.latent_gradient(dy, table.loops, groups.rows)

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.input_gradient_`."""
        LoopKernels.input_gradient_(dx, d_latent, table.loops, groups.rows)

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups
    ) -> None:
        """See `ExpertKernels.weight_gradients`."""
        LoopKernels.weight_gradients(x, latent, dy, d_latent, table.loops, groups.rows)


class DryExpertKernels(ExpertKernels):
    """Allocates on a fake GPU what `TritonExpertKernels` allocate on a real one; nothing is computed."""

    @staticmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.down`."""
        groups.tiles_of_tasks(table.bounds, TILE_ROWS)
        return x.new_empty(x.shape[0], table.width)

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.up_`."""

    @staticmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.latent_gradient`."""
        return dy.new_empty(dy.shape[0], table.width)

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups) -> None:
        """See `ExpertKernels.input_gradient_`."""

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: ExpertTable, groups: ExpertGroups
    ) -> None:
        """See `ExpertKernels.weight_gradients`."""


def expert_kernels_for(x: Tensor, chosen: KernelName | None = None) -> type[ExpertKernels]:
    """The kernels for an input `[P, K]`.

    Args:
        x: The input.
        chosen: Which; None, or one that cannot compute this input: the default.
    """
    if chosen == "loop" or not suits_triton(x.device, x.dtype):
        return LoopExpertKernels
    if isinstance(x, FakeTensor):
        return DryExpertKernels
    if not has_triton():
        return LoopExpertKernels
    from megatron_mux.kernels.triton_experts import TritonExpertKernels

    return TritonExpertKernels


class _ExpertLinear(torch.autograd.Function):
    """A frozen product and the terms of all tasks, with one backward. Only its input and the latent tensor are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        anchor: Tensor,
        table: ExpertTable,
        groups: ExpertGroups,
        kernels: type[ExpertKernels],
    ) -> Tensor:
        y = multiply(x, weight, groups)
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
            dx = multiply(dy, weight.transpose(1, 2), groups)
            kernels.input_gradient_(dx, d_latent, table, groups)
        return dx, None, None, None, None, None


def expert_linear(
    x: Tensor,
    weight: Tensor,
    anchor: Tensor,
    table: ExpertTable,
    groups: ExpertGroups,
    kernels: type[ExpertKernels],
) -> Tensor:
    """`grouped_product`, with the terms of each task added to its rows. The backward adds to the terms' gradients.

    Args:
        x: `[P, K]`.
        weight: `[E, N, K]`, frozen.
        anchor: A scalar that requires a gradient, and gets none: so that there is a backward pass if `x` needs none.
        table: The terms.
        groups: The rows of each expert and task.
        kernels: Computes the terms.

    Returns:
        `[P, N]`.
    """
    result: Tensor = _ExpertLinear.apply(x, weight, anchor, table, groups, kernels)  # type: ignore[no-untyped-call]
    return result
