"""Fake tensors are as torch's own fake mode makes them, shapes and storages, whichever way they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from megatron_mux.memory.fake_gpu.fake_tensors import FakeTensors

REAL = torch.arange(6.0).view(2, 3)


def _base() -> Tensor:
    return torch.empty(4, 6, 8, dtype=torch.bfloat16).transpose(0, 1)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda x: x[1:5:2],
    "view": lambda x: x.transpose(0, 1).view(2, 12, -1),
    "transpose": lambda x: x.transpose(1, 2),
    "split": lambda x: x.split(4, 2),
    "unbind": lambda x: x.unbind(0),
    "expand": lambda x: x[:, :1].expand(6, 5, 8),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 5),
    "bytes": lambda x: x.view(torch.uint8),
    "detached": lambda x: x.requires_grad_().detach(),
    "gradient": lambda x: torch.autograd.grad(x.requires_grad_().split(4, 2)[1].sum(), x),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda x: x.mul_(2.0).add_(x[:1]),
    "out": lambda x: torch.mul(x, x, out=torch.empty_like(x)),
    "out of nothing": lambda x: torch.mul(x, x, out=torch.empty(0, dtype=x.dtype)),
    "two out": lambda x: torch.max(
        x, 0, out=(torch.empty(4, 8, dtype=x.dtype), torch.empty(4, 8, dtype=torch.int64))
    ),
    "copied": lambda x: x.copy_(REAL[:1, :1].unsqueeze(0)),
    "many": lambda x: (torch._foreach_add_([x, x[0]], 1.0), x),
    "other shape": lambda x: x.clone().unsqueeze_(0),
    "resized": lambda x: x.clone().resize_(3, 3),
}
OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "products": lambda x: x[0] @ x[1].t(),
    "reshaped": lambda x: x.reshape(-1),
    "cast": lambda x: x.to(torch.float32),
    "as it is": lambda x: x.to(torch.bfloat16),
    "real": lambda x: REAL.view(3, 2)[1:] * 2,
    "changed constant": lambda x: torch.tensor(4).add_(1).item(),
}


def _described(mode: FakeTensorMode, make: Callable[[Tensor], Any]) -> list[Any]:
    """What results are, and whether they are the argument or share its storage."""
    with mode:
        given = _base()
        found = []
        for one in tree_leaves(make(given)):
            if isinstance(one, Tensor):
                assert isinstance(one, FakeTensor)
                shares = one.untyped_storage()._cdata == given.untyped_storage()._cdata
                place = one.shape, one.stride(), one.storage_offset(), one.dtype, one.device
                found.append(
                    (*place, one.requires_grad, one.untyped_storage().nbytes(), one is given, shares)
                )
            else:
                found.append(one)
        return found


@pytest.mark.parametrize("name", [*VIEWS, *WRITES, *OTHERS])
def test_results_are_those_of_torch(name: str) -> None:
    make = {**VIEWS, **WRITES, **OTHERS}[name]
    expected = _described(FakeTensorMode(allow_non_fake_inputs=True), make)
    assert _described(FakeTensors(), make) == expected


def test_a_step_that_torch_has_no_fake_kernel_for() -> None:
    with FakeTensors():
        own, momenta = [torch.zeros(3)], list[Tensor]()
        numbers = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": True}
        torch.ops.aten._fused_sgd_(own, own, momenta, **numbers, **flags)
