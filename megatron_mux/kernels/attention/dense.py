"""Causal attention of sequences of equal length, in memory that grows with their length, not with its square.

`scaled_dot_product_attention` multiplies all pairs of tokens where no kernel of the device takes a call as it is. So
keys are repeated where heads share them and the GPU's kernel does not know that; a causal mask is the kernel's own; and
where a mask must be in memory, queries are taken block by block.
Shapes: n sequences, h query heads, g key-value heads, L queries, S >= L keys, D head size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_FROM_LOWER_RIGHT = 2
"""Causal, aligned at the last query and the last key: `CausalVariant.LOWER_RIGHT` of `torch.nn.attention.bias`."""

_LARGEST_MASK = 1 << 22
"""Elements, a byte each: what is kept of masks stays below 64 MiB."""


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of `[n, h, L, D]` on `[n, g, S, D]`, each query on keys up to its own, aligned at the last position.

    Args:
        query: `[n, h, L, D]`; on a GPU D is a multiple of 8.
        key, value: `[n, g, S, D]`, with g dividing h.
        scale: What scores are multiplied by before the softmax.
        window: A query sees the `window` latest keys, its own included. None: all.

    Returns:
        `[n, h, L, D]`.
    """
    length, seen = query.shape[2], key.shape[2]
    group = query.shape[1] // key.shape[1]
    if group > 1 and query.device.type == "cuda":
        # The memory-efficient kernel takes as many keys as queries; others would, but not in fp32.
        key, value = (of_every_head(x.transpose(1, 2), group).transpose(1, 2) for x in (key, value))
        group = 1
    window = window if window is not None and window < seen else None
    if window is None and length == seen:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=group > 1
        )
    if window is None and _is_efficient(query):
        return _lower_right(query, key, value, scale)
    block = _block(length, seen, window)
    outputs = []
    for first in range(0, length, block):
        count = min(block, length - first)
        stop = seen - length + first + count
        start = 0 if window is None else max(0, stop - count - window + 1)
        mask = _mask(count, stop - start, window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, first : first + count],
                key[:, :, start:stop],
                value[:, :, start:stop],
                attn_mask=mask,
                scale=scale,
                enable_gqa=group > 1,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def of_every_head(x: Tensor, group: int) -> Tensor:
    """`[..., g * group, D]`, keys or values of each query head, of `[..., g, D]` of the heads that they share."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], group, x.shape[-1]).flatten(-3, -2)


def _is_efficient(query: Tensor) -> bool:
    """Whether the GPU has the memory-efficient kernel for such heads."""
    if query.device.type != "cuda" or query.shape[3] % 8:
        return False
    if query.dtype == torch.bfloat16:
        return torch.cuda.get_device_capability(query.device) >= (8, 0)
    return query.dtype in (torch.float16, torch.float32)


def _lower_right(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The memory-efficient kernel, which needs no mask in memory, as `torch.nn.attention.bias` calls it."""
    if isinstance(query, FakeTensor):
        # The same kernel allocates the same; torch 2.13's fake kernel of the operator below has no backward pass.
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    out: Tensor = torch.ops.aten._efficient_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        bias=None,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        dropout_p=0.0,
        custom_mask_type=_FROM_LOWER_RIGHT,
        compute_log_sumexp=has_gradient,
        scale=scale,
    )[0]
    return out.transpose(1, 2)


def _block(length: int, seen: int, window: int | None) -> int:
    """Queries of a block: as many as have a mask of at most `_LARGEST_MASK` elements, or one."""
    if length * seen <= _LARGEST_MASK:
        return length
    if window is None:
        return max(1, _LARGEST_MASK // seen)
    # About as many queries as the window has keys: fewer would read keys again and again, more would mask most of them.
    block = min(length, max(window, 256))
    while block > 1 and block * (block + window - 1) > _LARGEST_MASK:
        block = (block + 1) // 2
    return block


@lru_cache(maxsize=16)
def _mask(length: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """`[L, S]` bool: which of S keys each of the last L positions may see."""
    at = torch.arange(seen - length, seen, device=device).unsqueeze(1)
    of = torch.arange(seen, device=device)
    allowed = of <= at
    return allowed if window is None else allowed & (of > at - window)
