"""Linear modules that one tensor rank has all of: Megatron-Core's results, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_rows_are_one_product_whatever_the_strides(
    checkpoints: Callable[..., Path], parallel: Parallel
) -> None:
    """Embedded tokens come as a transposed `[1, T, H]`, of which torch would multiply each row by itself."""
    backbone = Backbone.load(checkpoints("gpt2"), parallel)
    for info in backbone.base_ops():
        module: Any = info.module
        x = torch.randn(1, 29, module.weight.shape[1]).transpose(0, 1)
        with torch.no_grad(), Operators() as operators:
            module(x)
            empty, _ = module(x[:0])
        assert empty.shape == (0, 1, module.weight.shape[0])
        assert "bmm" not in operators.names and len({"mm", "addmm"} & {*operators.names}) == 1, info.name
