"""Which kernel `scaled_dot_product_attention` uses on a GPU, by sizes and precision alone.

The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` as of torch 2.13, for dense tensors of
four dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megatron_mux.gpus import Gpu


class Kernel(StrEnum):
    """Kernels of attention."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention.

    Attributes:
        dtype: As torch names it.
        heads, groups: Heads of queries; of keys and values.
        queries, keys: Tokens of a sequence.
        width, values: Elements of a head of queries and keys; of values.
        masked: Whether there is a mask.
        causal: Whether tokens see only those before them.
        dropout: Dropout probability of scores.
        shares: Whether heads may share keys (`enable_gqa`).
    """

    dtype: str
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    values: int
    masked: bool = False
    causal: bool = True
    dropout: float = 0.0
    shares: bool = True


def kernel(gpu: Gpu, call: AttentionCall) -> Kernel:
    """The first kernel in the GPU's order of preference that supports a call."""
    same_heads = call.heads == call.groups
    if not same_heads and not (call.shares and call.heads % call.groups == 0):
        return Kernel.MATH
    if gpu.prefers_cudnn and _cudnn(gpu, call):
        return Kernel.CUDNN
    if _flash(gpu, call):
        return Kernel.FLASH
    return Kernel.EFFICIENT if same_heads and _efficient(gpu, call) else Kernel.MATH


def _half(gpu: Gpu, dtype: str) -> bool:
    return dtype in ("float16", "bfloat16") if gpu.capability >= (8, 0) else dtype == "float16"


def _cudnn(gpu: Gpu, call: AttentionCall) -> bool:
    widest = 256 if gpu.capability == (9, 0) else 128  # by cuDNN 9.10 and newer, which is what is preferred
    return (
        (8, 0) <= gpu.capability <= (12, 1)
        and _half(gpu, call.dtype)
        and all(size <= widest and size % 8 == 0 for size in (call.width, call.values))
        and call.keys > 1
        and float(call.dropout * 16).is_integer()  # cuDNN's resolution
    )


def _flash(gpu: Gpu, call: AttentionCall) -> bool:
    return (
        (8, 0) <= gpu.capability <= (12, 1)
        and _half(gpu, call.dtype)
        and not call.masked
        and call.width == call.values <= 256
        and (not call.causal or call.queries == call.keys)
        and not (gpu.capability in _LITTLE_SHARED_MEMORY and _too_wide_to_train(call))
    )


_LITTLE_SHARED_MEMORY = {(8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1)}


def _too_wide_to_train(call: AttentionCall) -> bool:
    """For flash attention's backward pass on such GPUs."""
    return 192 < call.width <= 224 or (call.width > 224 and call.dropout > 0)


def _efficient(gpu: Gpu, call: AttentionCall) -> bool:
    major = gpu.capability[0]
    half = call.dtype in ("float16", "bfloat16")
    known = half or call.dtype == "float32"
    if major < 8:
        known = known and call.dtype != "bfloat16"
    aligned = (8 if half else 4) if major >= 8 or (major == 7 and half) else 1
    return known and call.width % aligned == 0 and call.values % aligned == 0
