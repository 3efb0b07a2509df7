"""The layout of a micro-batch: sequences of several tasks, packed end to end on the token axis.

Shapes: T tokens in the micro-batch, N labelled tokens, H hidden, P prefix length, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_mux.kernels.attention import Segment
from megatron_mux.kernels.carry import Carry

PackedSequence = tuple[str, int, Tensor, Tensor, float]
"""What `pack` takes of a sequence: task, id, tokens `[L]` int64, which are labels `[L]` bool, weight of a label."""

Span = tuple[int, int]
"""First token of a sequence that is taken, and one past the last."""

PrefixKV = dict[int, dict[str, tuple[Tensor, Tensor]]]


@dataclass
class MicroBatch:
    """What one stage computes in one clock: sequences of several tasks, packed end to end, ordered by task.

    Attributes:
        segments: The sequences in row order.
        task_rows: Task name to its `(start, stop)` rows; only tasks present.
        tokens: `[T]` int64 token ids (0 in padding rows at the end).
        positions: `[T]` int64 position ids for the backbone (shifted by P for prefix tuning).
        token_index: `[T]` int64 index of the token in its sequence, from 0, never shifted.
        sequence_ids: `[T]` int64 `Segment.sequence` of each row.
        label_rows: `[N]` int64 rows whose next token is a label.
        labels: `[N]` int64 the tokens to predict there.
        label_weights: `[N]` fp32, one over the labelled tokens of the task's whole step.
        label_tasks: `[N]` int64 index into `task_names`.
        label_task_rows: Task name to its `(start, stop)` among the N labelled rows; only tasks present.
        task_names: Tasks of the step, in the order that `label_tasks` counts.
        task_steps: Task name to the number of optimizer steps it has done.
        training: False while evaluating: no dropout, deterministic masks.
        prefix: Layer to task to key and value, each `[P, kv heads on this rank, D]`; filled while computing.
        carry: Keys and values that chunks of the same packs keep for each other; None: no sequence is cut.
    """

    segments: tuple[Segment, ...]
    task_rows: Mapping[str, tuple[int, int]]
    tokens: Tensor
    positions: Tensor
    token_index: Tensor
    sequence_ids: Tensor
    label_rows: Tensor
    labels: Tensor
    label_weights: Tensor
    label_tasks: Tensor
    label_task_rows: Mapping[str, tuple[int, int]]
    task_names: tuple[str, ...]
    task_steps: Mapping[str, int]
    training: bool = True
    prefix: PrefixKV = field(default_factory=dict)
    carry: Carry | None = None

    @property
    def rows(self) -> int:
        """T, padding included."""
        return int(self.tokens.shape[0])

    @cached_property
    def labelled(self) -> MicroBatch:
        """The labelled rows alone, for operations on single rows: N rows, without segments.

        Fewer than T: the first token of a sequence is never a label.
        """
        rows = self.label_rows
        return replace(
            self,
            segments=(),
            task_rows=self.label_task_rows,
            tokens=self.tokens[rows],
            positions=self.positions[rows],
            token_index=self.token_index[rows],
            sequence_ids=self.sequence_ids[rows],
            label_rows=torch.arange(rows.shape[0], device=rows.device),
        )


_active: MicroBatch | None = None


@contextmanager
def activate(batch: MicroBatch) -> Iterator[MicroBatch]:
    """Make `batch` the active one: use it around its forward and around its backward, which may recompute.

    The active batch is a module global because autograd runs backward functions on threads of its own.
    """
    global _active
    before, _active = _active, batch
    try:
        yield batch
    finally:
        _active = before


def active() -> MicroBatch:
    """The active micro-batch.

    Raises:
        RuntimeError: Called outside `activate`.
    """
    if _active is None:
        raise RuntimeError("no micro-batch is active: run the backbone inside layout.activate(batch)")
    return _active


def pack(
    sequences: Sequence[PackedSequence],
    task_names: tuple[str, ...],
    task_steps: Mapping[str, int],
    position_offset: Mapping[str, int] | None = None,
    multiple: int = 1,
    training: bool = True,
    device: torch.device | str = "cpu",
    spans: Sequence[Span] | None = None,
    carry: Carry | None = None,
) -> MicroBatch:
    """Pack sequences, or the parts of them that a chunk holds, end to end.

    Args:
        sequences: `(task, sequence id, tokens [L] int64, labelled [L] bool, weight)`: `labelled[i]` says that token
            `i` is one to predict (from row `i - 1`; the first token never is). Sorted by `task_names`' order here.
        task_names: Tasks of the step.
        task_steps: Optimizer steps done by each task.
        position_offset: Task name to P for prefix tuning.
        multiple: Pad T to a multiple of this (sequence parallelism).
        training: See `MicroBatch.training`.
        device: Of the tensors.
        spans: First token and one past the last token to take of each sequence; None takes all of them.
        carry: See `MicroBatch.carry`; needed if spans leave tokens out.

    Returns:
        The micro-batch.
    """
    order = {name: i for i, name in enumerate(task_names)}
    whole = spans if spans is not None else [(0, int(s[2].shape[0])) for s in sequences]
    parts = sorted(zip(sequences, whole, strict=True), key=lambda part: order[part[0][0]])
    offsets = position_offset or {}
    names = [s[0] for s, _ in parts]
    starts = [0, *accumulate(stop - first for _, (first, stop) in parts)]
    index = [torch.arange(first, stop) for _, (first, stop) in parts]
    padding = torch.zeros((-starts[-1]) % multiple, dtype=torch.int64)
    join = partial(_join, device)
    return MicroBatch(
        segments=_segments(parts, starts, offsets),
        task_rows=_ranges((s[0], stop - first) for s, (first, stop) in parts),
        tokens=join((s[2][first:stop] for s, (first, stop) in parts), padding),
        positions=join((i + offsets.get(name, 0) for name, i in zip(names, index, strict=True)), padding),
        token_index=join(index, padding),
        sequence_ids=join(
            (torch.full_like(i, s[1]) for (s, _), i in zip(parts, index, strict=True)), padding
        ),
        task_names=task_names,
        task_steps=dict(task_steps),
        training=training,
        carry=carry,
        **_labels(parts, starts, order, device),
    )


def _segments(
    parts: Sequence[tuple[PackedSequence, Span]], starts: Sequence[int], offsets: Mapping[str, int]
) -> tuple[Segment, ...]:
    """The segment of each part of a sequence: which rows and tokens, and how long the whole sequence is."""
    return tuple(
        Segment(
            s[0],
            start,
            stop - first,
            s[1],
            first,
            stop < int(s[2].shape[0]),
            int(s[2].shape[0]) + offsets.get(s[0], 0),
        )
        for (s, (first, stop)), start in zip(parts, starts, strict=False)
    )


def _labels(
    parts: Sequence[tuple[PackedSequence, Span]],
    starts: Sequence[int],
    order: Mapping[str, int],
    device: torch.device | str,
) -> dict[str, Any]:
    """The label fields of a micro-batch. A row's label is the next token, even if that is in the next chunk."""
    targets = [s[3][first + 1 : stop + 1].nonzero().squeeze(1) for s, (first, stop) in parts]
    counts = torch.tensor([t.shape[0] for t in targets], dtype=torch.int64)
    weights = torch.tensor([s[4] for s, _ in parts], dtype=torch.float32)
    tasks = torch.tensor([order[s[0]] for s, _ in parts], dtype=torch.int64)
    return {
        "label_rows": _join(device, (t + start for t, start in zip(targets, starts, strict=False))),
        "labels": _join(
            device, (s[2][t + first + 1] for (s, (first, _)), t in zip(parts, targets, strict=True))
        ),
        "label_weights": weights.repeat_interleave(counts).to(device),
        "label_tasks": tasks.repeat_interleave(counts).to(device),
        "label_task_rows": _ranges((s[0], t.shape[0]) for (s, _), t in zip(parts, targets, strict=True)),
    }


def _join(device: torch.device | str, pieces: Iterable[Tensor], *after: Tensor) -> Tensor:
    """Concatenate int64 tensors, possibly none."""
    return torch.cat([torch.zeros(0, dtype=torch.int64), *pieces, *after]).to(device)


def _ranges(lengths: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """The rows of each task when sequences of these lengths, ordered by task, are packed end to end."""
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for task, length in lengths:
        found[task] = (found.get(task, (at, at))[0], at + length)
        at += length
    return found
