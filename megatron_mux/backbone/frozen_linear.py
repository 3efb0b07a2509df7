"""Megatron's linear modules where one tensor rank has all of a frozen weight: the product, and nothing around it.

Megatron-Core's own `forward` asks on each call for what cannot change in a run (collectives, offloading, gradients of
weights), and takes a `torch.autograd.Function` in Python for the product. Together that is most of what the host does
for such a module.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux import megatron_core

with megatron_core.quiet():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class WholeColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel module of one rank."""

    def forward(
        self, input_: Tensor, weight: None = None, runtime_gather_output: None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`[T, 1, K]` to `[T, 1, N]`, and the bias if it is skipped."""
        assert weight is None and runtime_gather_output is None, "a GPT model's layers give neither"
        return _product(self, input_)


class WholeRowLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel module of one rank."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """`[T, 1, K]` to `[T, 1, N]`, and the bias if it is skipped."""
        return _product(self, input_)


def use_whole_linear(model: nn.Module) -> None:
    """Make the linear modules of a model that one tensor rank computes such modules, in place."""
    for module in model.modules():
        if type(module) is ColumnParallelLinear:
            module.__class__ = WholeColumnLinear
        elif type(module) is RowParallelLinear:
            module.__class__ = WholeRowLinear


def _product(module: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    # The weight needs no gradient, so autograd keeps nothing but the weight. As a matrix: torch multiplies `[T, 1, K]`
    # row by row where its strides are those of a transposed `[1, T, K]`, as embedded tokens' are.
    x = input_.reshape(-1, input_.shape[-1])
    skipped = module.bias if module.skip_bias_add else None
    product = F.linear(x, module.weight, None if module.skip_bias_add else module.bias)
    return product.view(*input_.shape[:-1], product.shape[1]), skipped
