"""Causal attention over short segments on a CPU, as a few batched products of all segments of about one length.

torch's own kernel takes a call for each length and is slower: in bf16 its backward takes several times as long.
Segments are grouped by their length rounded up, and each is padded with a row of its own: no segment meets another, and
the shapes of its products depend on its own length only. The weights of all pairs of tokens are kept for the backward,
which is why only short segments come here.
Shapes: T tokens, h query heads, g key-value heads, r = h / g, D head size, n segments of a class, L their padded
length, M the sum of n L over classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONGEST = 512
"""Tokens of the longest segment that is computed here. Beyond it a layer would keep more weights than activations."""

BLOCK = 64
"""Queries in a block. Smaller blocks multiply fewer pairs that the mask drops, but their products get too thin."""


@dataclass(frozen=True)
class _Classes:
    """How the rows of a micro-batch are laid out by class; rows are those of `[T g, ...]`, a token's heads together.

    Attributes:
        sizes: `(n, L)` of each class.
        gather: `[M g]` int64 row of each padded row, which are ordered by class, segment, head and token.
        padding: int64 padded rows that are padding.
        scatter: `[T g]` int64 padded row of each row.
    """

    sizes: tuple[tuple[int, int], ...]
    gather: Tensor
    padding: Tensor
    scatter: Tensor


def padded_length(length: int) -> int:
    """Round up to one of four lengths per power of two, at least to a multiple of 8: at most a quarter is padding."""
    step = max(8, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


@lru_cache(maxsize=32)
def _classes(lengths: tuple[int, ...], groups: int) -> _Classes:
    """Cached, since every layer of a micro-batch needs the same."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    padded = [padded_length(length) for length in lengths]
    sizes, gather, valid = [], [], []
    for longest in sorted(set(padded)):
        members = [i for i, size in enumerate(padded) if size == longest]
        sizes.append((len(members), longest))
        at = np.arange(longest)
        counts = np.array([lengths[i] for i in members]).reshape(-1, 1, 1)
        # Padding repeats the last row of the segment itself.
        tokens = starts[members].reshape(-1, 1, 1) + np.minimum(at, counts - 1)
        gather.append((tokens * groups + np.arange(groups).reshape(-1, 1)).reshape(-1))
        valid.append(np.broadcast_to(at < counts, (len(members), groups, longest)).reshape(-1))
    rows, real = np.concatenate(gather), np.concatenate(valid)
    scatter = np.empty(int(starts[-1]) * groups, np.int64)
    scatter[rows[real]] = real.nonzero()[0]
    return _Classes(
        tuple(sizes),
        torch.from_numpy(rows),
        torch.from_numpy((~real).nonzero()[0]),
        torch.from_numpy(scatter),
    )


@lru_cache(maxsize=64)
def _bias(first: int, stop: int, repeats: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """`[(stop - first) r, stop]`: zero where the tokens from `first` to `stop` may see another, else minus infinity."""
    at, of = torch.arange(first, stop).unsqueeze(1), torch.arange(stop)
    hidden = of > at
    if window is not None:
        hidden |= of <= at - window
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(repeats, dim=0)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        classes: _Classes,
        scale: float,
        window: int | None,
    ) -> Tensor:
        tokens, groups, size = key.shape
        repeats = query.shape[1] // groups
        q = query.reshape(tokens * groups, repeats * size).index_select(0, classes.gather)
        k, v = (x.reshape(tokens * groups, size).index_select(0, classes.gather) for x in (key, value))
        out, weights = torch.empty_like(q), []
        for qs, ks, vs, outs in _by_class((q, k, v, out), classes, groups, size):
            for first, stop in blocks_of(ks.shape[1]):
                rows = slice(first * repeats, stop * repeats)
                bias = _bias(first, stop, repeats, window, query.dtype)
                scores = torch.baddbmm(bias, qs[:, rows], ks[:, :stop].transpose(1, 2), alpha=scale)
                weights.append(torch.softmax(scores, dim=-1))
                torch.bmm(weights[-1], vs[:, :stop], out=outs[:, rows])
        ctx.save_for_backward(q, k, v, *weights)
        ctx.classes, ctx.scale, ctx.groups = classes, scale, groups
        return out.index_select(0, classes.scatter).view(query.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, *kept), classes, groups = ctx.saved_tensors, ctx.classes, ctx.groups
        size, tokens = k.shape[1], gradient.shape[0]
        repeats, weights = q.shape[1] // size, iter(kept)
        d_out = gradient.reshape(tokens * groups, q.shape[1]).index_select(0, classes.gather)
        d_out.index_fill_(0, classes.padding, 0.0)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        tensors = (q, k, v, d_out, d_q, d_k, d_v)
        for qs, ks, vs, d_outs, d_qs, d_ks, d_vs in _by_class(tensors, classes, groups, size):
            for first, stop in blocks_of(ks.shape[1]):
                rows, weight = slice(first * repeats, stop * repeats), next(weights)
                d_vs[:, :stop].baddbmm_(weight.transpose(1, 2), d_outs[:, rows])
                d_weight = torch.bmm(d_outs[:, rows], vs[:, :stop].transpose(1, 2))
                d_scores = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype)
                torch.bmm(d_scores, ks[:, :stop], out=d_qs[:, rows])
                d_ks[:, :stop].baddbmm_(d_scores.transpose(1, 2), qs[:, rows])
        d_query, d_key, d_value = (x.index_select(0, classes.scatter) for x in (d_q, d_k, d_v))
        d_query.mul_(ctx.scale), d_key.mul_(ctx.scale)
        shape = (tokens, groups, size)
        return d_query.view(gradient.shape), d_key.view(shape), d_value.view(shape), None, None, None


def _by_class(tensors: Sequence[Tensor], classes: _Classes, groups: int, size: int) -> Iterator[list[Tensor]]:
    """Views of padded rows for the products of each class: `[n g, L r, D]`, of keys and values `[n g, L, D]`."""
    at = 0
    for n, length in classes.sizes:
        rows = slice(at, at + n * groups * length)
        yield [x[rows].view(n * groups, length * (x.shape[1] // size), size) for x in tensors]
        at = rows.stop


def pairs_and_padding(lengths: Sequence[int]) -> tuple[int, int, int]:
    """What segments take: pairs of tokens whose weights are kept, rows of padding, the most pairs of one product."""
    padded = Counter(map(padded_length, lengths))
    pairs = [
        count * (stop - first) * stop for length, count in padded.items() for first, stop in blocks_of(length)
    ]
    return sum(pairs), sum(length * n for length, n in padded.items()) - sum(lengths), max(pairs, default=0)


def blocks_of(length: int) -> list[tuple[int, int]]:
    """Blocks of queries, each of which multiplies with no keys beyond its own last one."""
    return [(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float, window: int | None
) -> Tensor:
    """Let each token attend to its own segment's tokens up to itself.

    Args:
        query: `[T, h, D]`.
        key: `[T, g, D]`, with g dividing h.
        value: Likewise.
        lengths: Of the segments, which end with row T; none above `LONGEST`.
        scale: What scores are multiplied by before the softmax.
        window: A token sees the `window` latest positions, itself included. None: all.

    Returns:
        `[T, h, D]`.
    """
    classes = _classes(lengths, key.shape[1])
    out: Tensor = _ShortAttention.apply(query, key, value, classes, scale, window)  # type: ignore[no-untyped-call]
    return out
