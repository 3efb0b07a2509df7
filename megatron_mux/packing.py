"""The arrays of a micro-batch, on the host: sequences of several tasks, or parts of them, laid end to end.

All arrays are made by a few operations of NumPy, however many sequences there are, and joined in one buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.kernels.attention import Segment
from megatron_mux.kernels.groups import tiles_of

Array = npt.NDArray[Any]

PackedSequence = tuple[str, int, Any, Any, float]
"""What `pack` takes of a sequence: task, id, tokens `[L]` int64, which are labels `[L]` bool, weight of a label.

Tokens and labels are NumPy arrays or CPU tensors.
"""

Span = tuple[int, int]
"""First token of a sequence that is taken, and one past the last."""

Ranges = Mapping[str, tuple[int, int]]
"""Task name to its `(start, stop)` rows."""

_ALIGNMENT = 16
"""Bytes. Every tensor begins at a multiple: kernels load 16 bytes at once, and Triton compiles for it once."""


def segments_of(parts: Sequence[tuple[PackedSequence, Span]], prefixes: Sequence[int]) -> tuple[Segment, ...]:
    """The segment of each part of a sequence: which rows and tokens, and how long the whole sequence is."""
    starts = accumulate((stop - first for _, (first, stop) in parts), initial=0)
    return tuple(
        Segment(s[0], start, stop - first, s[1], first, stop < len(s[2]), len(s[2]) + prefix)
        for (s, (first, stop)), start, prefix in zip(parts, starts, prefixes, strict=False)
    )


class Labels(NamedTuple):
    """The labels of rows.

    Attributes:
        tokens: `[N]`.
        rows: `[N]`, of the token before each.
        part: `[N]`, which part of a sequence each belongs to.
    """

    tokens: Array
    rows: Array
    part: Array


def rows_of(
    parts: Sequence[tuple[PackedSequence, Span]],
    segments: Sequence[Segment],
    prefixes: Sequence[int],
    multiple: int,
) -> tuple[list[Array], list[Array], Labels]:
    """Tokens, positions, indices of tokens and numbers of sequences: `[T]` of all rows, padded to a multiple, and `[N]`
    of those before a label; and the labels.
    """
    lengths, first, shift, of_sequence = (
        np.array(column, np.int64)
        for column in (
            [segment.length for segment in segments],
            [segment.past for segment in segments],
            prefixes,
            [segment.sequence for segment in segments],
        )
    )
    tokens, labels = _tokens_of(parts, lengths)
    part = np.repeat(np.arange(len(parts)), lengths)  # of each row
    index = np.arange(len(part)) - (np.cumsum(lengths) - lengths - first)[part]
    rows = [tokens, index + shift[part], index, of_sequence[part]]
    few = [row[labels.rows] for row in rows]
    padding = np.zeros(-len(part) % multiple, np.int64)
    return [np.concatenate([row, padding]) for row in rows] if len(padding) else rows, few, labels


def _tokens_of(parts: Sequence[tuple[PackedSequence, Span]], lengths: Array) -> tuple[Array, Labels]:
    """Tokens `[rows]`, and labels.

    A row's label is the next token, even if that is in the next chunk: so one token more is taken of each part that
    is not its sequence's last.
    """
    more = np.array([stop < len(s[2]) for s, (_, stop) in parts], np.int64)
    both = [np.zeros(0, np.int64), *(s[2][first : stop + 1] for s, (first, stop) in parts)]
    marks = [np.zeros(0, np.bool_), *(s[3][first : stop + 1] for s, (first, stop) in parts)]
    tokens, labelled = np.concatenate(both), np.concatenate(marks)
    ends = np.cumsum(lengths + more)
    labelled[ends - (lengths + more)] = False  # what a part begins with is not its own to predict
    at = np.flatnonzero(labelled)
    part = np.searchsorted(ends, at, side="right")
    labels = Labels(tokens[at], at - 1 - (np.cumsum(more) - more)[part], part)
    return (np.delete(tokens, ends[more > 0] - 1) if more.any() else tokens), labels


def tables_of(ranges: Ranges, steps: Mapping[str, int], slots: Mapping[str, int]) -> tuple[Array, Array]:
    """The table and the tiles of `RowGroups`, flat; tasks without a slot are in neither."""
    own = {name: rows for name, rows in ranges.items() if name in slots and rows[0] < rows[1]}
    present = [(slots[name], *rows, steps[name]) for name, rows in own.items()]
    tiles = list(tiles_of([(start, stop) for _, start, stop, _ in present]))
    return np.array(present, np.int32).reshape(-1), np.array(tiles, np.int32).reshape(-1)


def padded(lengths: Sequence[int], size: int) -> list[int]:
    """Items of `size` bytes: of each array, and of the padding after it."""
    return [items for length in lengths for items in (length, -length % (_ALIGNMENT // size))]


def joined(wide: Sequence[Array], narrow: Sequence[Array]) -> Array:
    """`[n]` uint8 of int64 arrays and arrays of 32 bits, each aligned to `_ALIGNMENT`."""
    sizes = [8 * size for size in padded([len(array) for array in wide], 8)]
    sizes += [4 * size for size in padded([len(array) for array in narrow], 4)]
    buffer = np.empty(sum(sizes), np.uint8)
    starts = accumulate(sizes, initial=0)
    for array, dtype in [*((a, np.int64) for a in wide), *((a, np.int32) for a in narrow)]:
        start = next(starts)
        buffer[start : start + array.size * np.dtype(dtype).itemsize].view(dtype)[:] = array
        next(starts)
    return buffer


def ranges_of(names: Sequence[str], lengths: Sequence[int]) -> dict[str, tuple[int, int]]:
    """The rows of each task when sequences of these lengths, ordered by task, are packed end to end."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for task, length in zip(names, lengths, strict=True):
        found[task] = (found.get(task, (at, at))[0], at + length)
        at += length
    return found
