"""Log-probabilities of sequences, with a task's adapter and with its reference, over the pipeline that trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.data.tokenise import Example
from megatron_mux.engine.forward_compute import LabelCompute, PassRunner
from megatron_mux.engine.out_of_memory import FailedBuckets, Stages
from megatron_mux.engine.preference.task import PreferenceTask
from megatron_mux.errors import SharedError
from megatron_mux.tasks.evaluation import filled

_AT_ONCE = 512
"""Sequences in host memory at a time."""


class _Sums(LabelCompute):
    """Keeps the summed negative log-likelihood of each sequence, `[n]` fp64."""

    def __init__(
        self, stages: Stages, batches: Sequence[PackedBatch], sequences: int, failed: FailedBuckets
    ) -> None:
        super().__init__(stages, batches, failed)
        device = next(iter(stages.values())).device
        self.sums: Tensor = torch.zeros(sequences, dtype=torch.float64, device=device)

    def keep(self, number: int, batch: PackedBatch, nll: Tensor, tokens: Tensor) -> None:
        """See `LabelCompute.keep`."""
        self.sums.index_add_(0, batch.labelled.groups.sequence_ids, nll.double())


@dataclass(frozen=True)
class Wanted:
    """Sequences of a task whose log-probabilities are wanted.

    Attributes:
        task: The task, attached.
        example: Reads a sequence; raises a `UserError` if it cannot be read.
        numbers: Which sequences.
        policy: Whether the task's adapter is asked, as well as its reference.
        batch_size: Most sequences of a pass that has some of these, those of the reference included; None is bound by
            tokens alone.
    """

    task: PreferenceTask
    example: Callable[[int], Example]
    numbers: Sequence[int]
    policy: bool = True
    batch_size: int | None = None

    @property
    def rows(self) -> list[int]:
        """The rows of a result that are computed: 0 with the adapter, 1 with the reference."""
        return [0] * self.policy + [1] * self.task.task.spec.training.needs_reference

    @property
    def names(self) -> tuple[str, str]:
        """The names under which sequences are packed: for the adapter, and for the reference."""
        return self.task.task.spec.name, self.task.reference_rows.name

    @property
    def together(self) -> float:
        """Most sequences of a pass, each counted once."""
        return math.inf if self.batch_size is None else self.batch_size // max(len(self.rows), 1)


class _Sequence(NamedTuple):
    """A sequence that was read."""

    wanted: Wanted
    example: Example


class LogProbs(PassRunner):
    """Computes log-probabilities of tasks' sequences in the same passes, shared out over data-parallel ranks."""

    def on_last_stage(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Compute without a host sync. Every rank calls it.

        Args:
            wanted: The sequences of all pipelines, by task.

        Returns:
            Of each task `[2, n]` fp64: with the task's adapter, and with its reference. Valid on the last stage.

        Raises:
            torch.OutOfMemoryError: There is no memory for a pass.
        """
        sequences = [_Sequence(w, w.example(i)) for w in wanted for i in w.numbers]
        sums, _ = self._computed(sequences, recovers=False)
        if self.parallel.dp_size > 1 and self.parallel.is_last_stage:
            dist.all_reduce(sums, group=self.parallel.dp_group)
        return _of_each(wanted, sums)

    def everywhere(self, wanted: Sequence[Wanted]) -> list[Tensor]:
        """Compute many sequences, some of which are read at a time. Every rank calls it, and waits.

        Args:
            wanted: The sequences of all pipelines, by task.

        Returns:
            Of each task `[2, n]` fp64 in host memory of every rank: with the adapter (zeros unless `policy`), and with
            the reference (zeros if the loss has none).

        Raises:
            SharedError: Some rank ran out of memory in a pass.
        """
        numbers = [(w, number) for w in wanted for number in w.numbers]
        log_probs = []
        for first in range(0, len(numbers), _AT_ONCE):
            sequences = [_Sequence(w, w.example(i)) for w, i in numbers[first : first + _AT_ONCE]]
            log_probs.append(self._everywhere(sequences))
        return _of_each(wanted, torch.cat(log_probs, dim=1))

    def _everywhere(self, sequences: Sequence[_Sequence]) -> Tensor:
        sums, failed = self._computed(sequences, None)
        if self.parallel.total([bool(failed)])[0]:
            raise SharedError(f"a pass ran out of memory ({failed.everywhere()[0]})")
        if not self.parallel.is_last_stage or self.parallel.tp_rank:
            sums.zero_()
        if self.parallel.world_size > 1:
            dist.all_reduce(sums)
        return sums.cpu()

    def _computed(
        self, sequences: Sequence[_Sequence], recovers: bool | None
    ) -> tuple[Tensor, FailedBuckets]:
        """This pipeline's share of the log-probabilities, `[2, n]`; zeros elsewhere."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers)
        compute = _Sums(self.stages, self._passes(sequences), 2 * len(sequences), failed)
        self.run(compute)
        return -compute.sums.view(2, -1), failed

    def _passes(self, sequences: Sequence[_Sequence]) -> list[PackedBatch]:
        """This pipeline's micro-batches; as many on every rank where ranks keep in step."""
        size = self.parallel.dp_size

        def tokens(i: int) -> int:
            return len(sequences[i].wanted.rows) * len(sequences[i].example.tokens)

        def of_pipeline(rank: int) -> list[list[int]]:
            positions = range(rank, len(sequences), size)
            return list(filled(positions, tokens, together=lambda i: sequences[i].wanted.together))

        groups = of_pipeline(self.parallel.dp_rank)
        if self.in_step:
            # Every rank knows all sequences: nothing is exchanged.
            most = max(len(of_pipeline(rank)) for rank in range(size))
            groups += [[] for _ in range(most - len(groups))]
        tasks = list({sequence.wanted.names: sequence.wanted.task for sequence in sequences}.values())
        return [self._pack(sequences, group, tasks) for group in groups]

    def _pack(
        self, sequences: Sequence[_Sequence], group: Sequence[int], tasks: Sequence[PreferenceTask]
    ) -> PackedBatch:
        packed = list[PackedSequence]()
        for row in (0, 1):
            for i in group:
                wanted, example = sequences[i]
                if row in wanted.rows:
                    number = row * len(sequences) + i
                    packed.append(
                        PackedSequence(wanted.names[row], number, example.tokens, example.labelled, 1.0)
                    )
        steps, slots, offsets = dict[str, int](), dict[str, int](), dict[str, int]()
        for task in tasks:
            name, reference = task.task.spec.name, task.reference_rows
            steps |= {name: task.step, reference.name: task.step}
            slots |= {name: task.slot} | ({} if reference.slot is None else {reference.name: reference.slot})
            offsets |= {name: task.position_offset, reference.name: reference.offset}
        host = pack(packed, tuple(steps), steps, offsets, self.multiple, training=False, slots=slots)
        return host.to(self.parallel.device)


def _of_each(wanted: Sequence[Wanted], sums: Tensor) -> list[Tensor]:
    """The columns of each task."""
    return list(sums.split([len(w.numbers) for w in wanted], dim=1))


def kl_term(log_probs: Tensor) -> Tensor:
    """KTO's KL term, a scalar: the mean log-ratio of mismatched completions, not below zero.

    Args:
        log_probs: `[2, n]` of policy and reference.
    """
    term: Tensor = (log_probs[0] - log_probs[1]).mean().clamp(min=0)
    return term
