"""Lays sequences of several tasks, or the parts of them that a chunk holds, end to end: the arrays of a micro-batch.

It needs no device and may be done ahead by another thread. All arrays are made by a few operations of NumPy, however
many sequences there are.

Shapes: T tokens in the micro-batch, N labelled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from megatron_mux.batch.balancing import NO_SEQUENCES, BalancedSequences
from megatron_mux.batch.host_batch import Array, Buffer, HostBatch, PresentTasks
from megatron_mux.kernels.attention.segments import Segment, bounds_of
from megatron_mux.kernels.groups import tiles_of

Span = tuple[int, int]
"""First token of a sequence that is taken, and one past the last."""


class PackedSequence(NamedTuple):
    """A sequence of a task's step.

    Attributes:
        task: Name of the task.
        number: Of the sequence in the step: dropout goes by it.
        tokens: `[L]` int64, a NumPy array or a CPU tensor.
        labelled: `[L]` bool: `labelled[i]` says that token `i` is one to predict (from row `i - 1`; the first token
            never is).
        weight: Of each label.
    """

    task: str
    number: int
    tokens: Any
    labelled: Any
    weight: float


class _Part(NamedTuple):
    """The part of a sequence that a chunk holds.

    Attributes:
        sequence: The sequence.
        start, stop: Its first token here, and one past the last.
        prefix: Prefix tokens of its task.
    """

    sequence: PackedSequence
    start: int
    stop: int
    prefix: int

    @property
    def goes_on(self) -> bool:
        """Whether a later chunk holds more of the sequence."""
        return self.stop < len(self.sequence.tokens)


class _Rows(NamedTuple):
    """Arrays of rows: `[T]` of all, padded to a multiple, or `[N]` of those before a label."""

    tokens: Array
    positions: Array
    token_index: Array
    sequence_ids: Array


class _Labels(NamedTuple):
    """Labels: `[N]` tokens, the row before each, and the part of a sequence that each belongs to."""

    tokens: Array
    rows: Array
    part: Array


def pack(
    sequences: Sequence[PackedSequence],
    task_names: tuple[str, ...],
    task_steps: Mapping[str, int],
    position_offset: Mapping[str, int] | None = None,
    multiple: int = 1,
    training: bool = True,
    spans: Sequence[Span] | None = None,
    slots: Mapping[str, int] | None = None,
    balanced: BalancedSequences = NO_SEQUENCES,
) -> HostBatch:
    """Pack sequences, or the parts of them that a chunk holds, end to end in host memory.

    Args:
        sequences: Sorted by `task_names`' order here.
        task_names: Tasks of the step.
        task_steps: Optimizer steps done by each task.
        position_offset: Task name to P for prefix tuning.
        multiple: Pad T to a multiple of this (sequence parallelism).
        training: See `PackedBatch.training`.
        spans: First token and one past the last token to take of each sequence; None takes all of them.
        slots: Task name to its slot (see `RowGroups`), by default its index; rows of names without one have no adapter.
        balanced: Sequences of the micro-batch that count for a balancing loss.
    """
    order = {name: i for i, name in enumerate(task_names)}
    slots = order if slots is None else slots
    parts = _parts(sequences, spans, position_offset or {}, order)
    segments = _segments(parts)
    rows, labelled, labels = _rows(parts, segments, multiple)
    task_rows = _ranges(parts, [segment.length for segment in segments])
    label_task_rows = _ranges(parts, np.bincount(labels.part, minlength=len(parts)).tolist())
    present = PresentTasks.of(task_rows, slots, task_steps)
    present_labelled = PresentTasks.of(label_task_rows, slots, task_steps)
    queries, keys, gather = bounds_of(segments, [part.prefix for part in parts])
    weights = np.array([part.sequence.weight for part in parts], np.float32)[labels.part]
    return HostBatch(
        buffer=Buffer.of(
            {
                **_wide(rows, labelled, labels),
                "label_tasks": np.array([order[own.sequence.task] for own in parts], np.int64)[labels.part],
                "gather": gather,
                **balanced.arrays(segments, len(rows.tokens), order),
            },
            {
                "label_weights": weights.view(np.int32),
                **_narrow(rows, present),
                **{f"labelled_{name}": own for name, own in _narrow(labelled, present_labelled).items()},
                "queries": queries,
                "keys": keys,
            },
        ),
        segments=segments,
        task_rows=task_rows,
        label_task_rows=label_task_rows,
        task_steps=dict(task_steps),
        training=training,
        present=present,
        present_labelled=present_labelled,
        longest=(_longest(queries), _longest(keys)),
    )


def _longest(bounds: Array) -> int:
    return int(np.diff(bounds).max(initial=0))


def _parts(
    sequences: Sequence[PackedSequence],
    spans: Sequence[Span] | None,
    prefixes: Mapping[str, int],
    order: Mapping[str, int],
) -> list[_Part]:
    """The parts of sequences, in the order of their tasks."""
    whole = spans if spans is not None else [(0, len(own.tokens)) for own in sequences]
    parts = [_Part(own, *span, prefixes.get(own.task, 0)) for own, span in zip(sequences, whole, strict=True)]
    return sorted(parts, key=lambda part: order[part.sequence.task])


def _segments(parts: Sequence[_Part]) -> tuple[Segment, ...]:
    """The segment of each part: which rows and tokens, and how long the whole sequence is."""
    starts = accumulate((part.stop - part.start for part in parts), initial=0)
    return tuple(
        Segment(
            part.sequence.task,
            start,
            part.stop - part.start,
            part.sequence.number,
            part.start,
            part.goes_on,
            len(part.sequence.tokens) + part.prefix,
        )
        for part, start in zip(parts, starts, strict=False)
    )


def _rows(parts: Sequence[_Part], segments: Sequence[Segment], multiple: int) -> tuple[_Rows, _Rows, _Labels]:
    """All rows, those before a label, and the labels."""
    lengths, first, shift, of_sequence = (
        np.array(column, np.int64)
        for column in (
            [segment.length for segment in segments],
            [segment.past for segment in segments],
            [part.prefix for part in parts],
            [segment.sequence for segment in segments],
        )
    )
    tokens, labels = _tokens(parts, lengths)
    part = np.repeat(np.arange(len(parts)), lengths)  # of each row
    index = np.arange(len(part)) - (np.cumsum(lengths) - lengths - first)[part]
    rows = _Rows(tokens, index + shift[part], index, of_sequence[part])
    labelled = _Rows(*(row[labels.rows] for row in rows))
    padding = np.zeros(-len(part) % multiple, np.int64)
    if len(padding):
        rows = _Rows(*(np.concatenate([row, padding]) for row in rows))
    return rows, labelled, labels


def _tokens(parts: Sequence[_Part], lengths: Array) -> tuple[Array, _Labels]:
    """Tokens `[rows]`, and labels.

    A row's label is the next token, even if that is in the next chunk: so one token more is taken of each part that
    is not its sequence's last.
    """
    more = np.array([part.goes_on for part in parts], np.int64)
    both, marks = [np.zeros(0, np.int64)], [np.zeros(0, np.bool_)]
    both += [part.sequence.tokens[part.start : part.stop + 1] for part in parts]
    marks += [part.sequence.labelled[part.start : part.stop + 1] for part in parts]
    tokens, labelled = np.concatenate(both), np.concatenate(marks)
    ends = np.cumsum(lengths + more)
    labelled[ends - (lengths + more)] = False  # what a part begins with is not its own to predict
    at = np.flatnonzero(labelled)
    part = np.searchsorted(ends, at, side="right")
    labels = _Labels(tokens[at], at - 1 - (np.cumsum(more) - more)[part], part)
    return (np.delete(tokens, ends[more > 0] - 1) if more.any() else tokens), labels


def _ranges(parts: Sequence[_Part], lengths: Sequence[int]) -> dict[str, tuple[int, int]]:
    """The rows of each task when parts with so many rows each are packed end to end."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for (sequence, *_), length in zip(parts, lengths, strict=True):
        task = sequence.task
        found[task] = (found.get(task, (at, at))[0], at + length)
        at += length
    return found


def _wide(rows: _Rows, labelled: _Rows, labels: _Labels) -> dict[str, Array]:
    """Arrays of 64 bits: of all rows, of labels, and of labelled rows, each of which is its own label's row."""
    return {
        "tokens": rows.tokens,
        "positions": rows.positions,
        "label_rows": labels.rows,
        "labels": labels.tokens,
        "labelled_tokens": labelled.tokens,
        "labelled_positions": labelled.positions,
        "labelled_label_rows": np.arange(len(labels.rows)),
    }


def _narrow(rows: _Rows, present: PresentTasks) -> dict[str, Array]:
    """Arrays of 32 bits of rows, with the ranges and the tiles of their `RowGroups`, flat."""
    of_tasks = zip(present.slots, present.rows, present.steps, strict=True)
    row_ranges = [(slot, *own, step) for slot, own, step in of_tasks]
    tiles = list(tiles_of(present.rows))
    return {
        "token_index": rows.token_index,
        "sequence_ids": rows.sequence_ids,
        "row_ranges": np.array(row_ranges, np.int32).reshape(-1),
        "tiles": np.array(tiles, np.int32).reshape(-1),
    }
