"""`scaled_dot_product_attention` with the kernel that a GPU would use.

Without a GPU, torch would use the math implementation, whose score matrices no GPU would allocate.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_mux.gpus import Gpu
from megatron_mux.memory.sdpa import AttentionCall, Kernel, kernel


class Attention:
    """Replaces `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        gpu: The simulated GPU.
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
        """Attention of [B, heads, L, D] queries with the kernel that the GPU would use."""
        query, key, value, attn_mask = _cast(query, key, value, attn_mask)
        taken = self.choice(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
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
        """The kernel that the GPU would use."""
        if not query.dim() == key.dim() == value.dim() == 4 or query.shape[0] != key.shape[0]:
            return Kernel.MATH
        (_, heads, queries, width), (_, groups, keys, _) = query.shape, key.shape
        dtype = str(query.dtype).removeprefix("torch.")
        call = AttentionCall(
            dtype,
            heads,
            groups,
            queries,
            keys,
            width,
            value.shape[-1],
            mask is not None,
            causal,
            dropout,
            grouped,
        )
        return kernel(self._gpu, call)


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
