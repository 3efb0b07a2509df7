"""What tasks' steps keep and take of memory by closed forms: see `StepMemory`, which tables of dry runs fill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from megatron_mux.footprint.content import Array
from megatron_mux.footprint.memory import Taken
from megatron_mux.fusion.alignment import Chunk
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.step import Lengths
from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.architecture import architecture_of
from megatron_mux.memory.forms.engine_bytes import Passes
from megatron_mux.memory.forms.engine_memory import EngineMemory, Rows
from megatron_mux.memory.forms.method import Method


class FormMemory:
    """The memory of tasks on a backbone divided into stages. Methods are those of `StepMemory`.

    Args:
        shape: The backbone's sizes.
        loads: The tasks.
        stages: The layers of each stage.
        method: How the step is divided among ranks, and what is computed again.
        itemsize: Bytes of the backbone's dtype.
        device: `cpu` or `cuda`.
        gpu: The GPU.
    """

    def __init__(
        self,
        shape: Any,
        loads: Sequence[TaskLoad],
        stages: Sequence[range],
        method: Method,
        itemsize: int,
        device: str,
        gpu: Gpu,
    ) -> None:
        adapters, lengths = [load.adapter for load in loads], [load.tokens for load in loads]
        self._forms = EngineMemory(
            architecture_of(shape), adapters, stages, method, itemsize, lengths, device, gpu
        )
        self._loads = {load.name: load for load in loads}
        self._index = {load.name: i for i, load in enumerate(loads)}
        self._total = np.array([float(load.total) for load in loads])
        self._labels = np.array([float(sum(load.labels)) for load in loads])
        self._longest = np.array([float(load.longest_sequence) for load in loads])
        self._together = np.array([float(load.together) for load in loads])
        self.overhead = self._forms.overhead

    @cached_property
    def lasting(self) -> Array:
        """`[S]` bytes that last from step to step."""
        return self._forms.lasting.total

    @cached_property
    def updating(self) -> Array:
        """`[S]` temporary bytes of the optimizer's step that takes most."""
        return self._forms.step_scratch

    def of_chunks(self, chunks: Sequence[Chunk]) -> Taken:
        """What exactly these chunks keep, and take besides."""
        lengths = {name: Lengths(load.tokens, load.labels) for name, load in self._loads.items()}
        found = contents_of(
            chunks, lengths, self._index, len(self._index), "cuda"
        )  # no attention by sequence
        virtual = [float(sum(self._loads[piece.task].virtual_tokens for piece in chunk)) for chunk in chunks]
        total, labels = found.rows.sum(axis=1), found.labels.sum(axis=1)
        return _taken(self._forms.passes(Rows(found.rows, total, labels, found.copied + virtual)))

    def of_parts(self, member: Array, parts: Array) -> Taken:
        """The same of one of equal parts of a step of hybrid tasks; its sequences are not divided."""
        rows, labels = member * self._total / parts[:, None], member @ self._labels / parts
        total = rows.sum(axis=1)
        most = np.maximum(total, (member * self._longest * self._together).max(axis=1))
        found = Rows(rows, most, labels * most / np.maximum(total, 1e-9), np.zeros(len(member)))
        return _taken(self._forms.passes(found))

    def longest(self, tasks: Sequence[int], length: int | None = None) -> Array:
        """`[T, S]` bytes of one record of each task, all of it labelled: kept, and taken besides."""
        lengths = self._longest if length is None else np.full(len(self._loads), float(length))
        found: Array = self._records(lengths, length is None).sum(axis=0)[list(tasks)]
        return found

    @cached_property
    def records(self) -> Array:
        """`[2, K, S]` the most bytes that a record of each task keeps, and that it takes besides."""
        return self._records(self._longest, True)

    def _records(self, lengths: Array, as_others: bool) -> Array:
        """`[2, K, S]` of a record of each task.

        Args:
            lengths: `[K]` tokens of its sequences.
            as_others: Whether a row may be one of the task's other sequences, which may take more.
        """
        most = lengths * self._together
        virtual = np.array([float(load.virtual_tokens) for load in self._loads.values()])
        one = Rows(np.diag(most), most, most, virtual)
        known = [self._forms.passes(one, length=own) for own in (lengths, None)[: 1 + as_others]]
        kept = np.max([own.lasting for own in known], axis=0)
        return np.array([kept, np.max([own.lasting + own.working for own in known], axis=0) - kept])


def _taken(passes: Passes) -> Taken:
    return Taken(passes.lasting, passes.working)
