"""The layout of a micro-batch: sequences of several tasks, packed end to end on the token axis.

`pack` lays a micro-batch out in host memory, which needs no device and may be done ahead by another thread;
`HostBatch.to` takes all of it to the device in one copy that the host does not wait for.

Shapes: T tokens in the micro-batch, N labelled tokens, H hidden, P prefix length, D head size, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.balancing import NOT_BALANCED, BalancedRows, BalancedSequences, Tally
from megatron_mux.kernels.attention import Bounds, Segment, bounds_of
from megatron_mux.kernels.carry import Carry
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.key_value_cache import KeyValueCache
from megatron_mux.packing import (
    Array,
    PackedSequence,
    Ranges,
    Span,
    joined,
    padded,
    ranges_of,
    rows_of,
    segments_of,
    tables_of,
)

__all__ = ["HostBatch", "MicroBatch", "PackedSequence", "Span", "activate", "active", "pack"]

PrefixKV = dict[int, dict[str, tuple[Tensor, Tensor]]]
Present = tuple[tuple[int, ...], tuple[Span, ...], tuple[int, ...]]
"""Slot, rows and steps of each task, as in `RowGroups`."""


@dataclass
class MicroBatch:
    """What one stage computes in one clock: sequences of several tasks, packed end to end, ordered by task.

    All its tensors are views of one buffer on the device.

    Attributes:
        segments: The sequences in row order.
        bounds: Arguments of variable-length attention over the segments; None for `labelled` rows.
        task_rows: Task name to its `(start, stop)` rows; only tasks present.
        groups: The same rows for kernels that compute all tasks at once; only tasks with rows.
        tokens: `[T]` int64 token ids (0 in padding rows at the end).
        positions: `[T]` int64 position ids for the backbone (shifted by P for prefix tuning).
        label_rows: `[N]` int64 rows whose next token is a label.
        labels: `[N]` int64 the tokens to predict there.
        label_weights: `[N]` fp32, one over the labelled tokens of the task's whole step.
        label_tasks: `[N]` int64 index among the tasks of the step.
        task_steps: Task name to the number of optimizer steps it has done.
        training: False while evaluating: no dropout, deterministic masks.
        prefix: Layer to task to key and value, each `[P, kv heads on this rank, D]`; filled while computing.
        carry: Keys and values that chunks of the same packs keep for each other; None: no sequence is cut.
        few: The labelled rows alone; None where this is them.
        balanced: Rows that count for a balancing loss; None: there are none.
        cache: Keys and values of sequences that are generated; None: none are.
    """

    segments: tuple[Segment, ...]
    bounds: Bounds | None
    task_rows: Ranges
    groups: RowGroups
    tokens: Tensor
    positions: Tensor
    label_rows: Tensor
    labels: Tensor
    label_weights: Tensor
    label_tasks: Tensor
    task_steps: Mapping[str, int]
    training: bool = True
    prefix: PrefixKV = field(default_factory=dict)
    carry: Carry | None = None
    few: MicroBatch | None = None
    balanced: BalancedRows | None = None
    cache: KeyValueCache | None = None

    @property
    def rows(self) -> int:
        """T, padding included."""
        return int(self.tokens.shape[0])

    @property
    def labelled(self) -> MicroBatch:
        """The labelled rows alone, for operations on single rows: N rows, without segments.

        Fewer than T: the first token of a sequence is never a label.
        """
        return self if self.few is None else self.few


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


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch in host memory.

    Attributes:
        buffer: `[n]` uint8, everything that the device needs: int64 arrays, then those of 32 bits.
        wide, narrow: The length of each array of 64 and of 32 bits.
        segments, task_rows, task_steps, training: See `MicroBatch`.
        label_task_rows: Task name to its `(start, stop)` among the N labelled rows; only tasks present.
        present: Slot, rows and steps of each task with rows and a slot: of all rows, and of the labelled ones.
        longest: Queries and keys of the longest segment.
    """

    buffer: Array
    wide: tuple[int, ...]
    narrow: tuple[int, ...]
    segments: tuple[Segment, ...]
    task_rows: Ranges
    label_task_rows: Ranges
    task_steps: Mapping[str, int]
    training: bool
    present: tuple[Present, Present]
    longest: tuple[int, int]

    @property
    def rows(self) -> int:
        """T, padding included."""
        return self.wide[0]

    @property
    def labels(self) -> int:
        """N."""
        return self.wide[2]

    def to(
        self,
        device: torch.device | str = "cpu",
        carry: Carry | None = None,
        staging: Tensor | None = None,
        tally: Tally | None = None,
        cache: KeyValueCache | None = None,
    ) -> MicroBatch:
        """Take the batch to a device. The host does not wait.

        Args:
            device: Of the tensors. On a CPU they are views of `buffer`.
            carry: See `MicroBatch.carry`; needed if spans leave tokens out.
            staging: Pinned memory of the buffer's size, to be left alone until the device has copied it; None takes
                some from torch, which may wait for the device to get it.
            cache: See `MicroBatch.cache`; then spans may leave tokens out without a `carry`.
            tally: That of the micro-batch, if an earlier chunk has made it; None: this one makes it, if it needs one.
        """
        whole = torch.from_numpy(self.buffer)
        if torch.device(device).type == "cuda":
            whole = runtime.to_device(whole, device, staging)
        words = 8 * sum(padded(self.wide, 8))
        wide = whole[:words].view(torch.int64).split(padded(self.wide, 8))[::2]
        narrow = whole[words:].view(torch.int32).split(padded(self.narrow, 4))[::2]
        tokens, positions, label_rows, labels, label_tasks, few_tokens, few_positions, few_rows = wide[:8]
        gather, *balancing = wide[8:]
        weights, *rest = narrow
        queries, keys = rest[8:]
        common: dict[str, Any] = {
            "labels": labels,
            "label_weights": weights.view(torch.float32),
            "label_tasks": label_tasks,
            "task_steps": self.task_steps,
            "training": self.training,
        }
        few = MicroBatch(
            segments=(),
            bounds=None,
            task_rows=self.label_task_rows,
            groups=self._groups(self.present[1], rest[4:8]),
            tokens=few_tokens,
            positions=few_positions,
            label_rows=few_rows,
            **common,
        )
        return MicroBatch(
            segments=self.segments,
            bounds=Bounds(queries, keys, *self.longest, gather if gather.shape[0] else None),
            task_rows=self.task_rows,
            groups=self._groups(self.present[0], rest[:4]),
            tokens=tokens,
            positions=positions,
            label_rows=label_rows,
            carry=carry,
            few=few,
            balanced=BalancedRows.of(balancing, tally),
            cache=cache,
            **common,
        )

    def _groups(self, present: Present, tensors: Sequence[Tensor]) -> RowGroups:
        slots, rows, steps = present
        index, ids, table, tiles = tensors
        return RowGroups(
            slots=slots,
            rows=rows,
            steps=steps,
            training=self.training,
            table=table.view(-1, 4),
            tiles=tiles.view(-1, 3),
            sequence_ids=ids,
            token_index=index,
        )


def _present(ranges: Ranges, slots: Mapping[str, int], task_steps: Mapping[str, int]) -> Present:
    """Of the tasks that have rows and a slot."""
    names = [name for name, (start, stop) in ranges.items() if start < stop and name in slots]
    own = tuple(slots[name] for name in names), tuple(ranges[name] for name in names)
    return *own, tuple(task_steps[name] for name in names)


def pack(
    sequences: Sequence[PackedSequence],
    task_names: tuple[str, ...],
    task_steps: Mapping[str, int],
    position_offset: Mapping[str, int] | None = None,
    multiple: int = 1,
    training: bool = True,
    spans: Sequence[Span] | None = None,
    slots: Mapping[str, int] | None = None,
    balanced: BalancedSequences | None = None,
) -> HostBatch:
    """Pack sequences, or the parts of them that a chunk holds, end to end in host memory.

    Args:
        sequences: `(task, sequence id, tokens [L] int64, labelled [L] bool, weight)`: `labelled[i]` says that token
            `i` is one to predict (from row `i - 1`; the first token never is). Sorted by `task_names`' order here.
        task_names: Tasks of the step.
        task_steps: Optimizer steps done by each task.
        position_offset: Task name to P for prefix tuning.
        multiple: Pad T to a multiple of this (sequence parallelism).
        training: See `MicroBatch.training`.
        spans: First token and one past the last token to take of each sequence; None takes all of them.
        slots: Task name to its slot (see `RowGroups`); by default tasks are counted in the order of `task_names`. Rows
            of a name without one are given to no adapter.
        balanced: Sequences of the micro-batch that count for a balancing loss; None: there are none.
    """
    order = {name: i for i, name in enumerate(task_names)}
    slots = order if slots is None else slots
    whole = spans if spans is not None else [(0, len(s[2])) for s in sequences]
    parts = sorted(zip(sequences, whole, strict=True), key=lambda part: order[part[0][0]])
    names = [s[0] for s, _ in parts]
    prefixes = [(position_offset or {}).get(name, 0) for name in names]
    segments = segments_of(parts, prefixes)
    rows, few, labels = rows_of(parts, segments, prefixes, multiple)
    weights = np.array([s[4] for s, _ in parts], np.float32)[labels.part]
    of_task = np.array([order[name] for name in names], np.int64)[labels.part]
    task_rows = ranges_of(names, [segment.length for segment in segments])
    label_task_rows = ranges_of(names, np.bincount(labels.part, minlength=len(parts)).tolist())
    queries, keys, gather = bounds_of(segments, prefixes)

    wide = [*rows[:2], labels.rows, labels.tokens, of_task, *few[:2], np.arange(len(labels.rows)), gather]
    balancing = NOT_BALANCED if balanced is None else balanced.arrays(segments, len(rows[0]), order)
    wide += [array.view(np.int64) for array in balancing]
    narrow = [weights.view(np.int32), *rows[2:], *tables_of(task_rows, task_steps, slots)]
    narrow += [*few[2:], *tables_of(label_task_rows, task_steps, slots), queries, keys]
    return HostBatch(
        buffer=joined(wide, narrow),
        wide=tuple(map(len, wide)),
        narrow=tuple(map(len, narrow)),
        segments=segments,
        task_rows=task_rows,
        label_task_rows=label_task_rows,
        task_steps=dict(task_steps),
        training=training,
        present=(_present(task_rows, slots, task_steps), _present(label_task_rows, slots, task_steps)),
        longest=(int(np.diff(queries).max(initial=0)), int(np.diff(keys).max(initial=0))),
    )
