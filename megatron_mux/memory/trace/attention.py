"""Which kernel `scaled_dot_product_attention` takes on a GPU, decided without one.

A torch without a GPU would take the mathematical form, whose score matrices no GPU would allocate. The rules are those
of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` as of torch 2.13, for dense tensors of four dimensions.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch

from megatron_mux.gpus import Gpu

_HALF = (torch.float16, torch.bfloat16)


class Kernel(StrEnum):
    """What computes attention."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


class Attention:
    """Stands in for `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        gpu: The GPU whose rules hold.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attention of [B, heads, L, D] queries by the kernel that the GPU would take."""
        query, key, value, attn_mask = _cast(query, key, value, attn_mask)
        kernel = self.choice(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        mask = _additive(attn_mask, query.dtype)
        needed = any(tensor.requires_grad for tensor in (query, key, value))
        ops = torch.ops.aten
        if kernel is Kernel.FLASH:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if kernel is Kernel.EFFICIENT:
            mask = _aligned(mask, query, key)
            found = ops._scaled_dot_product_efficient_attention(
                query, key, value, mask, needed, dropout_p, is_causal, scale=scale
            )
        elif kernel is Kernel.CUDNN:
            found = ops._scaled_dot_product_cudnn_attention(
                query, key, value, mask, needed, dropout_p, is_causal, False, scale=scale
            )
        else:
            found = ops._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )
        return found[0]  # type: ignore[no-any-return]

    def choice(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        grouped: bool,
    ) -> Kernel:
        """The first kernel in the GPU's order that can do it."""
        if not query.dim() == key.dim() == value.dim() == 4 or query.shape[0] != key.shape[0]:
            return Kernel.MATH
        heads = query.shape[1], key.shape[1]
        same_heads = heads[0] == heads[1]
        if not same_heads and not (grouped and heads[0] % heads[1] == 0):
            return Kernel.MATH
        if self._gpu.prefers_cudnn and self._cudnn(query, key, value, dropout):
            return Kernel.CUDNN
        if self._flash(query, key, value, mask, causal):
            return Kernel.FLASH
        if same_heads and self._efficient(query, value):
            return Kernel.EFFICIENT
        return Kernel.MATH

    def _half(self, dtype: torch.dtype) -> bool:
        return dtype in _HALF if self._gpu.capability >= (8, 0) else dtype == torch.float16

    def _cudnn(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
        wide = query.shape[-1], value.shape[-1]
        return (
            (8, 0) <= self._gpu.capability <= (12, 1)
            and self._half(query.dtype)
            and all(size <= 128 and size % 8 == 0 for size in wide)
            and key.shape[2] > 1
            and float(dropout * 16).is_integer()  # cuDNN's resolution
        )

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> bool:
        return (
            (8, 0) <= self._gpu.capability <= (12, 1)
            and self._half(query.dtype)
            and mask is None
            and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
            and (not causal or query.shape[2] == key.shape[2])
        )

    def _efficient(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        major = self._gpu.capability[0]
        half = query.dtype in _HALF
        known = half or query.dtype == torch.float32
        if major < 8:
            known = known and query.dtype != torch.bfloat16
        aligned = (8 if half else 4) if major >= 8 or (major == 7 and half) else 1
        return known and query.shape[-1] % aligned == 0 and value.shape[-1] % aligned == 0


def _cast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """As autocast casts the arguments of attention."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask of truths as one to add."""
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
    """The mask for every head, its rows beginning at multiples of 8 elements."""
    if mask is None:
        return None
    size = mask.shape[-1]
    if mask.stride(-1) != 1 or any(step % 8 for step in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - size % 8))[..., :size]
    return mask.expand(*query.shape[:3], key.shape[2])
