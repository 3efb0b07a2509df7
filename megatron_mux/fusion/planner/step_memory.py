"""What tasks' steps keep and take of memory, from tables: equation 5 of MuxTune.

Shapes: B micro-batches or chunks, H hybrid tasks, K tasks, S stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from megatron_mux.footprint.content import Array, Contents
from megatron_mux.footprint.memory import Memory, Taken
from megatron_mux.footprint.signature import Signature
from megatron_mux.fusion.alignment import Chunk, Slice
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad, persistent_share
from megatron_mux.fusion.step import Lengths
from megatron_mux.gpus import Gpu
from megatron_mux.kernels.attention.short import LONGEST
from megatron_mux.memory.estimate import process_overhead
from megatron_mux.memory.forms.method import ParallelConfig, Recompute
from megatron_mux.memory.forms.phases import FRAGMENTATION
from megatron_mux.memory.untraced import THREADS, cublas_of
from megatron_mux.shape import BackboneShape


class MemorySource(Protocol):
    """Where the memory of signatures comes from: `estimate.run_tables`."""

    def memory(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Memory:
        """The memory of tasks of these signatures on ranks that are divided so.

        Args:
            recompute: What is recomputed in the backward pass.
            short: Whether a CPU's attention computes all of their sequences as short ones.

        Raises:
            UserError: It cannot be predicted.
        """

    def prepare(
        self, mesh: Mesh, recompute: Recompute, signatures: Sequence[Signature], short: bool
    ) -> Future[None] | None:
        """Predict it in the background: once that is done, `memory` of these and of some of them is quick.

        Every rank calls it with the same arguments, which are those of `memory`.

        Returns:
            The work, on the rank that does it; None: there is nothing to wait for.
        """


@dataclass(frozen=True)
class Allowance:
    """What a rank needs besides its tensors.

    Attributes:
        fixed: Bytes that a process takes: its context, communicators, workspaces.
        share: Of what passes keep and take, what the allocator needs on top for its fragments.
    """

    fixed: float = 0.0
    share: float = 0.0

    @classmethod
    def of(cls, device: str, gpu: Gpu, method: ParallelConfig) -> Allowance:
        """On a GPU; none on a CPU, where only tensors are counted."""
        if device == "cpu":
            return cls()
        fixed = process_overhead(method.communicators) + THREADS * cublas_of(gpu)
        return cls(fixed, FRAGMENTATION[method.recompute])


def are_short(loads: Iterable[TaskLoad]) -> bool:
    """Whether a CPU's attention computes all sequences of these tasks as short ones."""
    return all(is_short(load.longest_sequence, load.virtual_tokens) for load in loads)


def is_short(longest: int, virtual_tokens: int) -> bool:
    """The same of sequences of so many tokens at most, behind so many virtual ones."""
    return longest <= LONGEST and not virtual_tokens


class StepMemory:
    """The memory of tasks on a backbone divided into stages.

    Args:
        memory: Of their signatures.
        device: `cpu` or `cuda`.
        allowance: What a rank needs besides.
    """

    def __init__(
        self,
        memory: Memory,
        loads: Sequence[TaskLoad],
        shape: BackboneShape,
        device: str,
        allowance: Allowance = Allowance(),
    ) -> None:
        self.overhead = allowance.fixed
        self._memory, self._loads, self._shape, self._device = memory, loads, shape, device
        self._share = 1 + allowance.share
        place = {signature: i for i, signature in enumerate(memory.signatures)}
        self._signatures = [load.signature(shape) for load in loads]
        self._columns = {load.name: place[sig] for load, sig in zip(loads, self._signatures, strict=True)}
        self._prefixed = {load.name for load in loads if load.virtual_tokens}
        self._is = np.zeros((len(loads), len(place)))
        self._is[np.arange(len(loads)), list(self._columns.values())] = 1.0

    @cached_property
    def persistent(self) -> Array:
        """`[S]` bytes that last from step to step."""
        return self._memory.persistent(self._counts)

    @cached_property
    def updating(self) -> Array:
        """`[S]` temporary bytes of the optimizer's step that takes most."""
        return self._memory.updating(self._counts)

    @cached_property
    def _counts(self) -> Array:
        """`[signatures]` tasks of each; one of a lower rank is less than one."""
        shares = [
            persistent_share(load.spec, self._shape, signature)
            for load, signature in zip(self._loads, self._signatures, strict=True)
        ]
        counts: Array = np.array(shares) @ self._is
        return counts

    def of_chunks(self, chunks: Sequence[Chunk]) -> Taken:
        """What exactly these chunks keep, and take besides."""
        lengths = {load.name: Lengths(load.tokens, load.labels) for load in self._loads}
        return self._taken(self._contents(chunks, lengths))

    def of_parts(self, member: Array, parts: Array) -> Taken:
        """The same of one of equal parts of a step of hybrid tasks; its sequences are not divided.

        Args:
            member: `[H, K]` 1 where a task is in it.
            parts: `[H]` number of parts.
        """
        step = self._step
        rows = member @ step.rows.sum(axis=1) / parts
        # A part has at least the longest record.
        scale = (np.maximum(rows, (member * self._longest).max(axis=1)) / np.maximum(rows, 1e-9))[:, None]
        each = member / parts[:, None]
        pairs, padding, _, long, _, _, masked = (each @ step.attention * scale).T
        block = np.minimum(pairs, (member * step.attention[:, 2]).max(axis=1))
        joined = (member.sum(axis=1) > 1) | (member @ step.attention[:, 4] > 0)
        total = (self._device == "cpu") * rows * scale[:, 0]
        return self._taken(
            Contents(
                each @ step.rows * scale,
                each @ step.labels * scale,
                np.maximum(1.0, each @ step.sequences),
                np.zeros(len(member)),
                np.stack([pairs, padding, block, long, total * joined, long * joined, masked], axis=1),
            )
        )

    def longest(self, tasks: Sequence[int], length: int | None = None) -> Array:
        """`[T, S]` bytes of one record of each task, all of it labelled: kept, and taken besides.

        Args:
            tasks: Which.
            length: Tokens of each of its sequences; None: of the longest that there is.
        """
        lengths, records = {}, []
        for load in (self._loads[task] for task in tasks):
            tokens = length or load.longest_sequence
            lengths[load.name] = Lengths((tokens,) * load.together, (tokens,) * load.together)
            records.append(tuple(Slice(load.name, i, 0, tokens) for i in range(load.together)))
        taken = self._taken(self._contents(records, lengths))
        return taken.kept + taken.working

    @cached_property
    def records(self) -> Array:
        """`[2, K, S]` the most bytes that a record of each task's step keeps, and that one takes besides.

        On a CPU these need not be the longest.
        """
        lengths = {load.name: Lengths(load.tokens, load.labels) for load in self._loads}
        micro_batches: list[list[Slice]] = []
        starts: list[int] = []
        for load in self._loads:
            starts.append(len(micro_batches))
            slices = [Slice(load.name, i, 0, tokens) for i, tokens in enumerate(load.tokens)]
            micro_batches += [slices[i : i + load.together] for i in range(0, len(slices), load.together)]
        taken = self._taken(self._contents(micro_batches, lengths))
        return np.array([np.maximum.reduceat(values, starts) for values in (taken.kept, taken.working)])

    @cached_property
    def _step(self) -> Contents:
        """Of each task's whole step."""
        lengths = {load.name: Lengths(load.tokens, load.labels) for load in self._loads}
        steps = [
            [Slice(load.name, i, 0, tokens) for i, tokens in enumerate(load.tokens)] for load in self._loads
        ]
        return self._contents(steps, lengths)

    @cached_property
    def _longest(self) -> Array:
        """`[K]` tokens of each task's longest record."""
        return np.array([float(load.longest_sequence * load.together) for load in self._loads])

    def _contents(self, micro_batches: Sequence[Sequence[Slice]], lengths: dict[str, Lengths]) -> Contents:
        return contents_of(
            micro_batches, lengths, self._columns, self._is.shape[1], self._device, self._prefixed
        )

    def _taken(self, contents: Contents) -> Taken:
        passes = self._memory.passes(contents)
        return Taken(passes.kept * self._share, passes.working * self._share)
