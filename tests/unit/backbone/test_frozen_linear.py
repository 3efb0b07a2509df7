"""Linear modules that one tensor rank has all of: Megatron-Core's results, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_mux.backbone.frozen_linear import WholeColumnLinear, WholeRowLinear
from megatron_mux.backbone.model import Backbone
from megatron_mux.runtime import Parallel


def computed(kind: type, module: Any, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """What a class's `forward` makes of a module: output, skipped bias, and the input's gradient."""
    x = x.clone().requires_grad_()
    y, bias = kind.forward(module, x)  # type: ignore[attr-defined]
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert x.grad is not None
    return y.detach(), bias, x.grad


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_as_megatron_computes_it(name: str, checkpoints: Callable[..., Path], parallel: Parallel) -> None:
    """gpt2 has biases: some are added, some are left to the caller."""
    backbone = Backbone.load(checkpoints(name), parallel)
    kinds = {WholeColumnLinear: ColumnParallelLinear, WholeRowLinear: RowParallelLinear}
    found = set()
    for info in backbone.base_ops():
        module: Any = info.module
        x = torch.randn(7, 1, module.weight.shape[1])
        y, bias, gradient = computed(type(module), module, x)
        other, other_bias, other_gradient = computed(kinds[type(module)], module, x)
        assert torch.equal(y, other) and torch.equal(gradient, other_gradient) and bias is other_bias
        found.add((type(module), module.bias is not None, bias is not None))
    assert len(found) == (2 if name == "llama" else 3)
