"""`scaled_dot_product_attention` with the kernel that a GPU would use.

Without a GPU, torch would use the math implementation, whose score matrices no GPU would allocate. Which kernel a GPU
uses follows the rules of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` as of torch 2.13, for dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from megatron_mux.gpus import Gpu

_LITTLE_SHARED_MEMORY = {(8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1)}
"""Compute capabilities on which flash attention cannot train some wide heads."""
_HALF = (torch.float16, torch.bfloat16)


class Kernel(StrEnum):
    """Kernels of attention."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


def attention_of(gpu: Gpu) -> Callable[..., torch.Tensor]:
    """What replaces `torch.nn.functional.scaled_dot_product_attention` on such a GPU."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query, key, value, attn_mask = _cast(query, key, value, attn_mask)
        taken = kernel_of(gpu, query, key, value, attn_mask is not None, dropout_p, is_causal, enable_gqa)
        mask = _additive(attn_mask, query.dtype)
        needed = any(tensor.requires_grad for tensor in (query, key, value))
        ops = torch.ops.aten
        if taken is Kernel.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if taken is Kernel.EFFICIENT:
            mask = _aligned(mask, query, key)
            found = ops._scaled_dot_product_efficient_attention(
                query, key, value, mask, needed, dropout_p, is_causal, scale=scale
            )
        elif taken is Kernel.CUDNN:
            found = ops._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needed, dropout_p, is_causal, False, scale=scale
            )
        else:
            found = ops._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
        return found[0]  # type: ignore[no-any-return]

    return attention


def kernel_of(
    gpu: Gpu,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masked: bool,
    dropout: float,
    causal: bool,
    shares: bool,
) -> Kernel:
    """The first kernel in a GPU's order of preference that supports a call.

    Args:
        query, key, value: `[B, heads, L, D]`; in other shapes only the math implementation takes them.
        shares: Whether heads may share keys (`enable_gqa`).
    """
    if not query.dim() == key.dim() == value.dim() == 4 or query.shape[0] != key.shape[0]:
        return Kernel.MATH
    (_, heads, queries, width), (_, groups, keys, _), values = query.shape, key.shape, value.shape[-1]
    if heads != groups and not (shares and heads % groups == 0):
        return Kernel.MATH
    capability, dtype = gpu.capability, query.dtype
    fused = (8, 0) <= capability <= (12, 1) and dtype in _HALF
    widest = 256 if capability == (9, 0) else 128  # by cuDNN 9.10 and newer, which is what is preferred
    if (
        gpu.prefers_cudnn
        and fused
        and all(size <= widest and size % 8 == 0 for size in (width, values))
        and keys > 1
        and float(dropout * 16).is_integer()  # cuDNN's resolution
    ):
        return Kernel.CUDNN
    too_wide_to_train = 192 < width <= 224 or (width > 224 and dropout > 0)
    if (
        fused
        and not masked
        and width == values <= 256
        and (not causal or queries == keys)
        and not (capability in _LITTLE_SHARED_MEMORY and too_wide_to_train)
    ):
        return Kernel.FLASH
    is_efficient = heads == groups and _is_efficient(gpu, dtype, width, values)
    return Kernel.EFFICIENT if is_efficient else Kernel.MATH


def _is_efficient(gpu: Gpu, dtype: torch.dtype, width: int, values: int) -> bool:
    """Whether the memory-efficient kernel takes heads of these widths."""
    major, half = gpu.capability[0], dtype in _HALF
    known = half or dtype == torch.float32
    if major < 8:
        known = known and dtype != torch.bfloat16
    aligned = (8 if half else 4) if major >= 8 or (major == 7 and half) else 1
    return known and width % aligned == 0 and values % aligned == 0


def _cast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """Cast the arguments of attention like autocast."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Turn a boolean mask into an additive one."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    lowest = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, lowest)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Flash attention, on heads padded to a multiple of 8."""
    size = query.shape[-1]
    if missing := -size % 8:
        scale = size**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(t, (0, missing)) for t in (query, key, value))
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )
    return found[0][..., :size] if missing else found[0]  # type: ignore[no-any-return]


def _aligned(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask for every head, with rows aligned to 8 elements."""
    if mask is None:
        return None
    size = mask.shape[-1]
    if mask.stride(-1) != 1 or any(step % 8 for step in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - size % 8))[..., :size]
    return mask.expand(*query.shape[:3], key.shape[2])
