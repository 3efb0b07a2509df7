"""From a task's records to the micro-batches of a step: their lengths, their tokens, and the tensors of each chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_mux import layout
from megatron_mux.data.dataset import Example
from megatron_mux.engine.agreement import first_problem
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Chunk
from megatron_mux.fusion.step import StepGrid
from megatron_mux.kernels.carry import Carry
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.pipeline.action import Action, Unit
from megatron_mux.runtime import Parallel


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """An example's tokens `[L]` int64 and which of them are labels `[L]` bool."""
    return (
        torch.from_numpy(np.asarray(example.tokens, dtype=np.int64)),
        torch.from_numpy(np.asarray(example.labelled, dtype=np.bool_)),
    )


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """The same with zeros up to a length, if it is shorter."""
    return torch.cat([x, x.new_zeros(length - x.shape[0])]) if x.shape[0] < length else x


def read_together(
    names: Sequence[str], read: Callable[[str, int], list[PackedSequence]], steps: int, parallel: Parallel
) -> tuple[list[dict[str, list[PackedSequence]]], dict[str, str]]:
    """Read each task's next batches; what one rank cannot read counts as unreadable on every rank.

    Args:
        names: The tasks of the steps.
        read: Reads a task's sequences of a step from now; raises a `UserError` if it cannot.
        steps: How many steps.
        parallel: Where this rank stands.

    Returns:
        For each step before the first with an unreadable batch, at least one, the sequences of the tasks whose first
        batch was read; and for the other tasks what is wrong. The same on every rank.
    """
    found: list[dict[str, list[PackedSequence]]] = [{} for _ in range(steps)]
    problems: list[dict[str, str]] = [{} for _ in range(steps)]
    for step in range(steps):
        for name in names:
            try:
                found[step][name] = read(name, step)
            except UserError as error:
                problems[step][name] = str(error)
    counts = parallel.total([name in problems[step] for step in range(steps) for name in names])
    bad = [(i // len(names), names[i % len(names)]) for i, count in enumerate(counts) if count]
    # In the order of the tasks: each of these calls is one of all ranks.
    unreadable = {name: first_problem(problems[0].get(name, ""), parallel) for step, name in bad if not step}
    readable = min((step for step, name in bad if name not in unreadable), default=steps)
    kept = [name for name in names if name not in unreadable]
    return [{name: step[name] for name in kept} for step in found[:readable]], unreadable


@dataclass(eq=False)
class StepBatches:
    """The micro-batches of this pipeline in one or several steps; a unit is laid out when it is first asked for.

    Args:
        grids: For each step, the sequences in each chunk.
        fetched: For each step, each task's sequences over all pipelines.
        steps: Optimizer steps each task has done before the first of them.
        offsets: Virtual tokens in front of each task's sequences.
        slots: The slot of each task (see `RowGroups`).
        parallel: Where this rank stands.
    """

    grids: Sequence[StepGrid]
    fetched: Sequence[Mapping[str, list[PackedSequence]]]
    steps: Mapping[str, int]
    offsets: Mapping[str, int]
    slots: Mapping[str, int]
    parallel: Parallel
    _laid_out: dict[Unit, tuple[MicroBatch, ...]] = field(default_factory=dict, init=False)
    _carries: dict[tuple[int, int], Carry] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.names = tuple(self.fetched[0])
        self._period = len(self.grids[0].sizes)

    def __getitem__(self, unit: Unit) -> tuple[MicroBatch, ...]:
        """A batch for each hybrid task with sequences in the unit; without rows if only other pipelines have any."""
        if unit not in self._laid_out:
            self._laid_out[unit] = tuple(self._pack(unit, chunk) for chunk in self._chunks(unit))
        return self._laid_out[unit]

    def rows(self, unit: Unit) -> int:
        """Rows of a unit, before they are divided among tensor ranks; without laying it out."""
        multiple = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        sizes = (sum(piece.tokens for piece in chunk) for chunk in self._chunks(unit))
        return sum(-(-size // multiple) * multiple for size in sizes)

    def labels(self, unit: Unit) -> int:
        """Labelled tokens of a unit; without laying it out."""
        step = unit.bucket // self._period
        pieces = (piece for chunk in self._chunks(unit) for piece in chunk)
        return sum(
            int(self.fetched[step][piece.task][piece.sequence][3][piece.start : piece.stop].sum())
            for piece in pieces
        )

    @property
    def max_rows(self) -> int:
        """Rows of the largest unit."""
        units = ((step, unit) for step, grid in enumerate(self.grids) for unit in grid.chunks)
        rows = (self.rows(replace(unit, bucket=unit.bucket + step * self._period)) for step, unit in units)
        return max(rows, default=1)

    def anew(self) -> StepBatches:
        """A copy with nothing laid out yet."""
        return replace(self)

    def forget(self, unit: Unit) -> None:
        """Drop a unit that is done; harmless for one that was never laid out."""
        self._laid_out.pop(unit, None)
        if not unit.chunk:  # the last to be back-propagated
            self._carries.pop((unit.bucket, unit.micro_batch), None)

    def label(self, action: Action) -> str:
        """Label of a pass in a picture: its tasks, hybrid task by hybrid task."""
        order = self.names.index
        return " | ".join(
            "+".join(sorted({piece.task for piece in chunk}, key=order))
            for chunk in self._chunks(action.unit)
            if chunk
        )

    def _chunks(self, unit: Unit) -> tuple[Chunk, ...]:
        step, bucket = divmod(unit.bucket, self._period)
        return self.grids[step].chunks[Unit(bucket, unit.micro_batch, unit.chunk)]

    def _pack(self, unit: Unit, chunk: Chunk) -> MicroBatch:
        step, bucket = divmod(unit.bucket, self._period)
        carry = None
        if self.grids[step].sizes[bucket][unit.micro_batch] > 1:
            # Keys and values wait for later chunks of the same micro-batch only.
            carry = self._carries.setdefault((unit.bucket, unit.micro_batch), Carry())
        return layout.pack(
            [self.fetched[step][piece.task][piece.sequence] for piece in chunk],
            self.names,
            {name: done + step for name, done in self.steps.items()},
            self.offsets,
            self.parallel.tp_size if self.parallel.sequence_parallel else 1,
            training=True,
            device=self.parallel.device,
            spans=[(piece.start, piece.stop) for piece in chunk],
            carry=carry,
            slots=self.slots,
        )
