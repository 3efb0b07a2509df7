"""What the kernel of a dispatched operator takes for itself, by the operator's name and arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_mux.memory import untraced
from megatron_mux.memory.untraced import Scratch


def scratch_of(operator: str, args: Sequence[Any]) -> list[Scratch]:
    """What an operator takes and returns; nothing if the table has no entry for it.

    Args:
        operator: Its name without `aten::`.
        args: Its positional arguments.
    """
    found = _OPERATORS.get(operator)
    return found(args) if found is not None else []


def _flash(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient, queries, keys [B, heads, L, D], ..."""
    query, key = args[1], args[2]
    batch, heads, queries, head = query.shape
    return untraced.flash(batch, heads, key.shape[1], queries, key.shape[2], head, query.element_size())


def _flash_packed(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient, queries [T, heads, D], keys, values, output, its log-sum-exp, where segments begin, ..."""
    query, key, bounds = args[1], args[2], args[6]
    (queries, heads, head), (keys, groups, _) = query.shape, key.shape
    return untraced.flash_packed(
        bounds.shape[0] - 1, heads, groups, queries, keys, head, query.element_size()
    )


def _sort(args: Sequence[Any]) -> list[Scratch]:
    values = args[0]
    if values.device.type == "cpu" or values.dim() != 1:
        return []
    return untraced.sort(values.numel(), values.element_size())


def _cudnn(args: Sequence[Any]) -> list[Scratch]:
    batch, heads, queries, head = args[1].shape
    return untraced.cudnn(batch, heads, queries, head)


def _efficient(args: Sequence[Any]) -> list[Scratch]:
    batch, heads, queries, head = args[1].shape
    return untraced.efficient(batch, heads, queries, head, args[1].element_size())


def _embedding(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient [..., H], tokens, ..."""
    return untraced.embedding(args[1].numel(), args[0].shape[-1])


def _norm(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient [..., H], input, ..., whether gradients of input, weight and bias are wanted."""
    hidden = args[0].shape[-1]
    each = untraced.norm(args[0].numel() // hidden, hidden, args[1].element_size())
    return each * sum(bool(wanted) for wanted in args[-1][1:])


def _foreach_norm(args: Sequence[Any]) -> list[Scratch]:
    return untraced.foreach_norm([tensor.numel() for tensor in args[0]])


_OPERATORS: Mapping[str, Callable[[Sequence[Any]], list[Scratch]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash,
    "torch_attn::_varlen_attn_backward": _flash_packed,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn,
    "_scaled_dot_product_efficient_attention_backward": _efficient,
    "embedding_dense_backward": _embedding,
    "native_layer_norm_backward": _norm,
    "_fused_rms_norm_backward": _norm,
    "_foreach_norm": _foreach_norm,
    "sort": _sort,
}
