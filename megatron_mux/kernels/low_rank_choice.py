"""Which kernels compute low-rank terms on a device."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.loop_low_rank import LoopKernels
from megatron_mux.kernels.low_rank import LowRankKernels
from megatron_mux.kernels.terms import TermTable


class DryKernels(LowRankKernels):
    """Allocates on a fake GPU what `TritonKernels` allocate on a real one; nothing is computed."""

    @staticmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.down`."""
        return x.new_empty(x.shape[0], table.width(groups))

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.up_`."""

    @staticmethod
    def latent_gradient(dy: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.latent_gradient`."""
        return dy.new_empty(dy.shape[0], table.width(groups))

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.input_gradient_`."""

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups
    ) -> None:
        """See `LowRankKernels.weight_gradients`."""


def kernels_for(x: Tensor) -> type[LowRankKernels]:
    """The kernels for an input `[T, K]`: Triton's on a GPU, except in fp64; else the reference."""
    if x.device.type != "cuda" or x.dtype == torch.float64:
        return LoopKernels
    return DryKernels if isinstance(x, FakeTensor) else _gpu_kernels()


@cache
def _gpu_kernels() -> type[LowRankKernels]:
    if importlib.util.find_spec("triton") is None:
        return LoopKernels
    from megatron_mux.kernels.triton_low_rank import TritonKernels

    return TritonKernels
