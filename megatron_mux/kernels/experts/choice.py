"""Which kernels compute low-rank terms on routed experts on a device."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.experts.groups import ExpertGroups
from megatron_mux.kernels.experts.interface import TILE_ROWS, ExpertKernels
from megatron_mux.kernels.experts.reference import LoopExpertKernels
from megatron_mux.kernels.experts.terms import ExpertTable
from megatron_mux.kernels.low_rank.choice import KernelName
from megatron_mux.kernels.triton_choice import computes_nothing, has_triton, suits_triton


class DryExpertKernels(ExpertKernels):
    """Allocates on a fake GPU what `TritonExpertKernels` allocate on a real one; nothing is computed."""

    up_ = input_gradient_ = weight_gradients = staticmethod(computes_nothing)

    @staticmethod
    def down(x: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.down`."""
        groups.tiles_of_tasks(table.bounds, TILE_ROWS)
        return x.new_empty(x.shape[0], table.width)

    @staticmethod
    def latent_gradient(dy: Tensor, table: ExpertTable, groups: ExpertGroups) -> Tensor:
        """See `ExpertKernels.latent_gradient`."""
        return dy.new_empty(dy.shape[0], table.width)


def expert_kernels_for(x: Tensor, chosen: KernelName | None = None) -> type[ExpertKernels]:
    """The kernels for an input `[P, K]`.

    Args:
        chosen: Which; None, or one that cannot compute this input: the default.
    """
    if chosen == "loop" or not suits_triton(x.device, x.dtype):
        return LoopExpertKernels
    if isinstance(x, FakeTensor):
        return DryExpertKernels
    if not has_triton():
        return LoopExpertKernels
    from megatron_mux.kernels.experts.triton import TritonExpertKernels

    return TritonExpertKernels
