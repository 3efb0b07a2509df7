"""Which kernels compute the terms of adapters on a device."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.base_ops import BaseOpName
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.grouped_rows import GroupedKernels
from megatron_mux.kernels.low_rank.product import LowRankKernels, partials_of
from megatron_mux.kernels.low_rank.reference import LoopKernels
from megatron_mux.kernels.low_rank.terms import TermTable
from megatron_mux.kernels.triton_choice import computes_nothing, has_triton, suits_triton

KernelName = Literal["loop", "triton"]
KernelChoice = tuple[tuple[BaseOpName, KernelName], ...]
"""Which kernels compute the low-rank terms of a BaseOp; where it is not named, the default ones do."""


class DryKernels(GroupedKernels):
    """Allocates on a fake GPU what `TritonKernels` allocate on a real one; nothing is computed."""

    up_ = input_gradient_ = scale_ = factor_gradients = staticmethod(computes_nothing)

    @staticmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.down`."""
        return x.new_empty(x.shape[0], table.width(groups))

    @staticmethod
    def latent_gradient(dy: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.latent_gradient`."""
        return dy.new_empty(dy.shape[0], table.width(groups))

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups
    ) -> None:
        """See `LowRankKernels.weight_gradients`."""
        partials = [partials_of(values, table, groups) for values in (x, dy)]
        if any(partial.shape[0] for partial in partials):
            DryKernels.add_parts_()

    @staticmethod
    def add_parts_() -> None:
        """What `weight_gradients` launches besides if some task's rows are divided."""

    @staticmethod
    def activated(latent: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `GroupedKernels.activated`."""
        return torch.empty_like(latent)

    @staticmethod
    def activation_gradient_(d_latent: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `GroupedKernels.activation_gradient_`."""
        return torch.empty_like(latent)


def kernels_for(x: Tensor, chosen: KernelName | None = None) -> type[LowRankKernels]:
    """The kernels for an input `[T, K]`.

    Args:
        chosen: Which; None, or one that cannot compute this input: the default.
    """
    if isinstance(x, FakeTensor):
        return DryKernels if chosen != "loop" and suits_triton(x.device, x.dtype) else LoopKernels
    here = alternatives(x.device, x.dtype)
    return _kernels(chosen if chosen in here else here[0])


def alternatives(device: torch.device, dtype: torch.dtype) -> tuple[KernelName, ...]:
    """The kernels that compute low-rank terms in a dtype on a device, the default first."""
    return ("triton", "loop") if suits_triton(device, dtype) and has_triton() else ("loop",)


@cache
def _kernels(name: KernelName) -> type[LowRankKernels]:
    if name == "loop":
        return LoopKernels
    from megatron_mux.kernels.low_rank.triton import TritonKernels

    return TritonKernels
