"""Chooses who computes `pointwise.functions`, by device and dtype: Triton kernels, or torch's operators."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.triton_choice import computes_nothing, has_triton, suits_triton

PointwiseName = Literal["triton", "torch"]

LAUNCHES = dict.fromkeys(
    ("activate", "activate_backward", "join", "join_backward", "turn", "turn_backward"), 1
)
"""Device launches of each operation by Triton kernels."""


class DryPointwise:
    """On a fake GPU: `pointwise.functions` has allocated what Triton kernels write to, and nothing is computed."""

    activate = activate_backward = staticmethod(computes_nothing)
    join = join_backward = turn = turn_backward = staticmethod(computes_nothing)


PointwiseKernels = ModuleType | type[DryPointwise]
"""What `pointwise.functions` launches: operations that write to given tensors. See the Triton modules."""


def pointwise_name(device: torch.device, dtype: torch.dtype) -> PointwiseName:
    """Which kernels compute a dtype on a device."""
    return "triton" if suits_triton(device, dtype) and has_triton() else "torch"


@cache
def pointwise_kernels(
    kind: type[Tensor], device: torch.device, dtype: torch.dtype
) -> PointwiseKernels | None:
    """The kernels for tensors of a class, a device and a dtype; None: torch's operators."""
    if not suits_triton(device, dtype):
        return None
    if issubclass(kind, FakeTensor):
        return DryPointwise
    if not has_triton():
        return None
    from megatron_mux.kernels.pointwise import triton as triton_pointwise

    return triton_pointwise
