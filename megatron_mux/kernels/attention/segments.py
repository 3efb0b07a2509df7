"""Causal attention over packed segments: no segment ever sees another, not even multiplied by zero.

One function, `segment_attention`. It runs one variable-length kernel for all segments (bf16 and fp16 on GPUs of compute
capability 8.0 and more), batched products of segments of about equal length (on a CPU, if they are short and have
neither a prefix nor a past), else `dense_attention` run by run of equal segments.
Shapes: T tokens, p tokens of earlier chunks, h query heads, g key-value heads, D head size, P prefix length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.attention.dense import dense_attention
from megatron_mux.kernels.attention.short import LONGEST, short_attention
from megatron_mux.runtime import has_varlen

Array = npt.NDArray[Any]
Prefix = Mapping[str, tuple[Tensor, Tensor]]

_ALIGNED = 8
"""Features of a head that kernels of GPUs load at once: with others PyTorch would multiply all pairs of tokens."""


@dataclass(frozen=True)
class Segment:
    """One sequence on the token axis, or the part of it that a chunk holds.

    Attributes:
        task: Name of the task it belongs to.
        start: First row.
        length: Number of tokens.
        sequence: Index of the sequence within its task's whole step (the same on every rank and packing).
        past: Tokens of the sequence in earlier chunks: attended to through the keys and values they left.
        continues: Whether later chunks hold more of the sequence, and want this one's keys and values.
        positions: Positions of the whole sequence, those of a prefix included.
    """

    task: str
    start: int
    length: int
    sequence: int
    past: int = 0
    continues: bool = False
    positions: int = 0


@dataclass(frozen=True)
class _Run:
    """Neighbouring segments that one call serves.

    They are short, whatever their lengths; or all have one length and, where a prefix applies, one task. One that has a
    past is alone. How a segment is computed never depends on its neighbours.

    Attributes:
        lengths: Tokens of each segment.
        past: Tokens of earlier chunks of the only segment.
        task: Whose prefix applies, if any.
        short: Whether `short_attention` computes them.
    """

    lengths: tuple[int, ...]
    past: int = 0
    task: str | None = None
    short: bool = False

    @property
    def rows(self) -> int:
        return sum(self.lengths)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    window: int | None = None,
    prefix: Prefix | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Let each token attend to its own segment's tokens up to itself, and to its task's prefix.

    Args:
        query: `[T, h, D]`.
        key: `[p + T, g, D]`, with g dividing h: first the past of every segment that has one, in their order (see
            `Carry.extend`).
        value: `[p + T, g, D]`, or wider or narrower heads.
        segments: In row order, end to end from row 0; rows after the last one are padding.
        scale: What scores are multiplied by before the softmax.
        window: A token sees the `window` latest positions, itself included; prefix positions count. None: all.
        prefix: Task name to key and value, each `[P, g, D]`, put before every segment of that task.
        bounds: The segments' bounds, for the variable-length kernel; None has them computed and copied.

    Returns:
        `[T, h, D]`, D that of the values; padding rows are zero.
    """
    prefix, narrow = prefix or {}, value.shape[2]
    width = max(query.shape[2], narrow)
    if query.device.type == "cuda":
        width += -width % _ALIGNED
    if not query.shape[2] == narrow == width:
        # Features of zeros change no score, and are dropped from the output.
        query, key, value = (_widened(x, width) for x in (query, key, value))
        wide = {task: (_widened(k, width), _widened(v, width)) for task, (k, v) in prefix.items()}
        out = segment_attention(
            query, key, value, segments, scale=scale, window=window, prefix=wide, bounds=bounds
        )
        return out[..., :narrow]
    if has_one_call(query.device, query.dtype):
        bounds = bounds or device_bounds(segments, prefix, query.device)
        return _by_varlen(query, key, value, segments, scale, window, prefix, bounds)
    short = LONGEST if query.device.type == "cpu" else 0
    return _by_runs(query, key, value, segments, scale, window, prefix, short)


def _widened(x: Tensor, width: int) -> Tensor:
    """Heads of `width` features, the new ones zero."""
    return F.pad(x, (0, width - x.shape[2]))


def has_one_call(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether one kernel serves all segments of a batch, however long each is."""
    return device.type == "cuda" and can_have_one_call(
        dtype.itemsize, torch.cuda.get_device_capability(device)
    )


def can_have_one_call(itemsize: int, capability: tuple[int, int]) -> bool:
    """The same of any GPU."""
    return itemsize == 2 and capability >= (8, 0) and has_varlen()


def _runs(segments: Sequence[Segment], prefix: Prefix, short: int) -> list[_Run]:
    """Group neighbours that one call can serve, in row order."""

    def kind(segment: Segment) -> tuple[bool, int, str | None, int]:
        task = segment.task if segment.task in prefix else None
        if segment.length <= short and task is None and not segment.past:
            return True, 0, None, 0
        # A past makes a segment unlike any other.
        return False, segment.length, task, segment.start if segment.past else -1

    runs = []
    for (is_short, _, task, _), group in groupby(segments, kind):
        members = tuple(group)
        runs.append(_Run(tuple(s.length for s in members), members[0].past, task, is_short))
    return runs


def _by_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None,
    prefix: Prefix,
    short: int = 0,
) -> Tensor:
    """One call a run; segments of at most `short` tokens by `short_attention`.

    Split and concatenate once, so that autograd copies each gradient once.
    """
    runs = _runs(segments, prefix, short)
    padding = query.shape[0] - sum(run.rows for run in runs)
    sizes = [run.rows for run in runs] + [padding] * (padding > 0)
    pasts = [run.past for run in runs if run.past]
    keys, values = key.split([*pasts, *sizes]), value.split([*pasts, *sizes])
    past = iter(zip(keys, values, strict=True))
    triples = zip(query.split(sizes), keys[len(pasts) :], values[len(pasts) :], strict=True)
    outputs = []
    for run, (q, k, v) in zip(runs, triples, strict=False):
        if run.short:
            outputs.append(short_attention(q, k, v, run.lengths, scale, window))
            continue
        count = len(run.lengths)
        q, k, v = (x.unflatten(0, (count, run.lengths[0])) for x in (q, k, v))
        before = [tuple(x.expand(count, *x.shape) for x in prefix[run.task])] if run.task is not None else []
        if run.past:
            before.append(tuple(x.unsqueeze(0) for x in next(past)))
        if before:
            k, v = (
                torch.cat([*(b[0] for b in before), k], dim=1),
                torch.cat([*(b[1] for b in before), v], dim=1),
            )
        out = dense_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, window)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    if padding:
        outputs.append(query.new_zeros(padding, *query.shape[1:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


# ---- variable-length kernel -----------------------------------------------------------------------------------------


def _flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, *, scale: float, window: int | None
) -> Tensor:
    """`varlen_attn` without its two operators in Python, which take the host longer than anything else in a layer.

    The operator below them has a backward of its own, and lets query heads share keys.
    """
    left, right = (-1 if window is None else window - 1), 0
    out: Tensor = torch.ops.aten._flash_attention_forward.default(
        query, key, value, bounds.queries, bounds.keys, bounds.longest_query, bounds.longest_key, 0.0,
        window is None, False, scale=scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return out


@dataclass(frozen=True)
class Bounds:
    """Arguments of the variable-length kernel for a micro-batch: they are on the device before it begins.

    Attributes:
        queries: `[S + 1]` int32, the first query of each segment and one past the last.
        keys: `[S + 1]` int32, the same of keys.
        longest_query, longest_key: Queries and keys of the longest segment.
        gather: `[keys]` int64 rows of (prefixes, then pasts, then tokens) that make up the keys; None if they are the
            tokens.
    """

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    gather: Tensor | None


def bounds_of(segments: Sequence[Segment], prefixes: Sequence[int]) -> tuple[Array, Array, Array]:
    """The arrays of `Bounds`, on the host; `gather` is empty where keys are the tokens.

    Args:
        segments: In row order.
        prefixes: The length of the prefix of each segment's task. Tasks' prefixes come in the order of their segments.
    """
    counts = np.zeros((len(segments), 3), np.int64)  # of prefix, past and own tokens
    counts[:, 0] = prefixes
    counts[:, 1:] = np.array([(s.past, s.length) for s in segments], np.int64).reshape(-1, 2)
    queries = np.concatenate([[0], np.cumsum(counts[:, 2])])
    keys = np.concatenate([[0], np.cumsum(counts.sum(axis=1))])
    if not counts[:, :2].any():
        return queries, keys, np.zeros(0, np.int64)
    places, behind = {}, 0
    for segment, length in zip(segments, prefixes, strict=True):
        if segment.task not in places:
            places[segment.task] = behind
            behind += length
    first = np.empty_like(counts)
    first[:, 0] = [places[segment.task] for segment in segments]
    first[:, 1] = behind + np.cumsum(counts[:, 1]) - counts[:, 1]
    first[:, 2] = behind + counts[:, 1].sum() + queries[:-1]
    flat = counts.reshape(-1)
    rows = np.repeat(first.reshape(-1) - (np.cumsum(flat) - flat), flat) + np.arange(flat.sum())
    return queries, keys, rows


def device_bounds(segments: Sequence[Segment], prefix: Prefix, device: torch.device) -> Bounds:
    """The bounds of segments, copied to a device; the host waits for it.

    Args:
        segments: In row order.
        prefix: See `segment_attention`.
        device: Where the kernel runs.
    """
    lengths = [prefix[s.task][0].shape[0] if s.task in prefix else 0 for s in segments]
    queries, keys, gather = bounds_of(segments, lengths)
    return Bounds(
        torch.tensor(queries, dtype=torch.int32, device=device),
        torch.tensor(keys, dtype=torch.int32, device=device),
        int(np.diff(queries).max()),
        int(np.diff(keys).max()),
        torch.tensor(gather, device=device) if len(gather) else None,
    )


def _by_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None,
    prefix: Prefix,
    bounds: Bounds,
) -> Tensor:
    """All segments in one call; causal is aligned at the last position, so a prefix is only more keys."""
    rows = segments[-1].start + segments[-1].length
    padding = query.shape[0] - rows
    if padding:
        query = query[:rows]
    if bounds.gather is None:
        if padding:
            key, value = key[:rows], value[:rows]
    else:
        tasks = dict.fromkeys(segment.task for segment in segments)
        used = {task: prefix[task] for task in tasks if task in prefix}
        key = torch.cat([*(pair[0] for pair in used.values()), key]).index_select(0, bounds.gather)
        value = torch.cat([*(pair[1] for pair in used.values()), value]).index_select(0, bounds.gather)
    out = _flash(query, key, value.contiguous(), bounds, scale=scale, window=window)
    return torch.cat((out, out.new_zeros(padding, *out.shape[1:]))) if padding else out
