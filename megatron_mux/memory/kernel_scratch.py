"""Scratch memory that CUDA kernels allocate for themselves, by operator.

Sizes are read from the sources that `untraced.TABLE` names. They ignore rounding to blocks of tokens if the error is
below a hundredth, so that they are polynomials of batch and length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_mux.memory.sizes import MIB
from megatron_mux.memory.untraced import CUDNN, EFFICIENT, EMBEDDING, FLASH, FOREACH_NORM, NORM, SORT

SMALL_INDEX = 3072
"""The gradient of an embedding sorts tokens if there are more than this."""
MANY_TOKENS = 1 << 16
"""The gradient of a norm's weight is reduced in two steps if there are more tokens than this."""


class Scratch(NamedTuple):
    """A block that an operator allocates and frees: its name in `untraced.TABLE`, and its bytes."""

    name: str
    size: int


def scratch_of(operator: str, args: Sequence[Any]) -> list[Scratch]:
    """Scratch of an operator; empty if the table has no entry for it.

    Args:
        operator: Its name without `aten::`.
    """
    found = _OPERATORS.get(operator)
    return found(args) if found is not None else []


def _flash_scratch(rows: int, keys: int, heads: int, groups: int, head: int, itemsize: int) -> list[Scratch]:
    """Scratch of flash attention's backward pass.

    Args:
        rows: Rows of queries: each sequence is rounded up to 128 rows; packed segments are 128 rows apart.
        keys: Tokens of keys, of all sequences.
    """
    wide = _up(head, 32 if head <= 128 else 64)
    found = [rows * heads * 4, rows * heads * wide * 4]  # softmax_d, dq_accum
    if heads != groups:
        found += [keys * heads * head * itemsize] * 2  # dk_expanded, dv_expanded
    return [Scratch(FLASH, size) for size in found]


def _flash(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient, queries, keys [B, heads, L, D], ..."""
    query, key = args[1], args[2]
    (batch, heads, queries, head), (_, groups, keys, _) = query.shape, key.shape
    rows = batch * _up(queries, 128)
    return _flash_scratch(rows, batch * keys, heads, groups, head, query.element_size())


def _flash_packed(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient, queries [T, heads, D], keys, values, output, its log-sum-exp, where segments begin, ..."""
    query, key, bounds = args[1], args[2], args[6]
    (queries, heads, head), (keys, groups, _) = query.shape, key.shape
    rows = queries + 128 * (bounds.shape[0] - 1)
    return _flash_scratch(rows, keys, heads, groups, head, query.element_size())


def _cudnn(args: Sequence[Any]) -> list[Scratch]:
    """Likely scratch of cuDNN attention's backward pass: the queries' gradient in fp32, and a number for each row."""
    batch, heads, queries, head = args[1].shape
    return [Scratch(CUDNN, batch * heads * queries * (head + 1) * 4)]


def _efficient(args: Sequence[Any]) -> list[Scratch]:
    """A number for each row, and if queries are not in fp32, their gradient in fp32."""
    batch, heads, queries, head = args[1].shape
    wide = head if args[1].element_size() < 4 else 0
    return [Scratch(EFFICIENT, batch * heads * queries * (1 + wide) * 4)]


def _embedding(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient [..., H], tokens, ...

    It sorts the tokens and adds up runs of equal ones: sorted tokens and places, each twice while they are sorted, the
    beginnings and lengths of runs (eight bytes each), and rows of fp32: at most one for each token, and another one for
    each ten (13 in 128 here). A vocabulary smaller than the batch needs fewer.
    """
    tokens, hidden = args[1].numel(), args[0].shape[-1]
    if tokens <= SMALL_INDEX:
        return []
    sizes = (2 * tokens * 8, 5 * tokens * 8, tokens * (128 + 13) * _up(hidden, 32) * 4 // 128)
    return [Scratch(EMBEDDING, size) for size in sizes]


def _norm(args: Sequence[Any]) -> list[Scratch]:
    """Arguments: gradient [..., H], input, ..., whether gradients of input, weight and bias are wanted.

    For the weight, and for the bias: 32,768 blocks of 32 elements if there are many tokens and rows are narrow (on the
    132 multiprocessors of a Hopper).
    """
    hidden = args[0].shape[-1]
    if args[0].numel() // hidden <= MANY_TOKENS or hidden // 32 >= 66:
        return []
    wanted = sum(bool(one) for one in args[-1][1:])
    return [Scratch(NORM, MIB * args[1].element_size())] * wanted


def _foreach_norm(args: Sequence[Any]) -> list[Scratch]:
    """For each tensor a number for each 65,536 elements of the largest one."""
    sizes = [tensor.numel() for tensor in args[0]]
    return [Scratch(FOREACH_NORM, len(sizes) * -(-max(sizes) // 65536) * 4)] if sizes else []


def _sort(args: Sequence[Any]) -> list[Scratch]:
    """One long row: indices of its elements, and elements and indices once more while it sorts."""
    values = args[0]
    if values.device.type == "cpu" or values.dim() != 1:
        return []
    return [Scratch(SORT, values.numel() * (8 + values.element_size() + 8))]


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


_OPERATORS: Mapping[str, Callable[[Sequence[Any]], list[Scratch]]] = {
    "_scaled_dot_product_flash_attention_backward": _flash,
    "torch_attn::_varlen_attn_backward": _flash_packed,
    "_flash_attention_backward": _flash_packed,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn,
    "_scaled_dot_product_efficient_attention_backward": _efficient,
    "embedding_dense_backward": _embedding,
    "native_layer_norm_backward": _norm,
    "_fused_rms_norm_backward": _norm,
    "_foreach_norm": _foreach_norm,
    "sort": _sort,
}
