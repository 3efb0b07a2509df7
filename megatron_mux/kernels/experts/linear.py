"""Products of routed experts with the LoRAs of all tasks and experts.

Shapes: P rows, ordered by expert and task, K and N input and output width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.kernels.experts.groups import ExpertGroups
from megatron_mux.kernels.experts.interface import ExpertKernels
from megatron_mux.kernels.experts.product import multiply
from megatron_mux.kernels.experts.terms import ExpertTable


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

    Returns:
        `[P, N]`.
    """
    result: Tensor = _ExpertLinear.apply(x, weight, anchor, table, groups, kernels)  # type: ignore[no-untyped-call]
    return result
