"""Which kernels dequantise on a device."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_mux.kernels.dequantise.interface import DequantiseKernels
from megatron_mux.kernels.triton_choice import computes_nothing, has_triton


class DryDequantise(DequantiseKernels):
    """Allocates on a fake GPU what `TritonDequantise` allocates on a real one: nothing."""

    nf4 = eight_bit = staticmethod(computes_nothing)


def kernels_for(place: Tensor) -> type[DequantiseKernels] | None:
    """The kernels that dequantise into a tensor; None: there are none on its device."""
    if place.device.type != "cuda":
        return None
    if isinstance(place, FakeTensor):
        return DryDequantise
    if not has_triton():
        return None
    from megatron_mux.kernels.dequantise.triton import TritonDequantise

    return TritonDequantise
