"""Held-out loss and accuracy of one task, over the same pipeline that trains it, a group of records at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import layout
from megatron_mux.data.dataset import Example
from megatron_mux.engine.agreement import first_problem
from megatron_mux.engine.compute import EvaluationCompute, Stages
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.task_state import TaskState
from megatron_mux.engine.trial import Trials
from megatron_mux.errors import SharedError, UserError
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.template import forward_only
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS

# Passes of one group, times the stages: the pipeline drains between groups, and these keep that rare.
PASSES_PER_STAGE = 8


class Records(Protocol):
    """What is evaluated: a `TaskDataset`, or some records of one."""

    def __len__(self) -> int: ...

    def candidates(self, number: int, /) -> tuple[list[Example], int]:
        """See `TaskDataset.candidates`."""

    @property
    def end_of_sequence(self) -> int:
        """See `TaskDataset`."""

    @property
    def distinct_completions(self) -> Any:
        """See `TaskDataset`."""


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found.

    Attributes:
        loss: Mean negative log-likelihood over labelled tokens.
        accuracy: With at most 16 distinct completions, the share of records whose own completion is the likeliest;
            else the share of labelled tokens predicted, end-of-sequence left out.
        records: Records evaluated.
    """

    loss: float
    accuracy: float
    records: int


_Record = tuple[list[Example], int]
"""A record's sequence, with every completion of the file where records are to be classified; and which is its own."""


def _groups(records: Iterator[_Record], passes: int, batch_size: int | None) -> Iterator[list[_Record]]:
    """Records in their order, as many at a time as fill about so many passes; a record is never divided."""
    group: list[_Record] = []
    tokens = sequences = 0
    for record in records:
        group.append(record)
        tokens += sum(len(example.tokens) for example in record[0])
        sequences += len(record[0])
        if tokens >= passes * TOKENS_PER_PASS or (batch_size and sequences >= passes * batch_size):
            yield group
            group, tokens, sequences = [], 0, 0
    if group:
        yield group


def _next_together(groups: Iterator[list[_Record]], parallel: Parallel) -> list[_Record] | None:
    """This rank's next group, empty if only others have one left; None once nobody has. Every rank calls it.

    Raises:
        SharedError: Some rank could not read its records.
    """
    group: list[_Record] = []
    problem = ""
    try:
        group = next(groups, [])
    except UserError as error:
        problem = str(error)
    problems, left = parallel.total([bool(problem), bool(group)])
    if problems:
        raise SharedError(first_problem(problem, parallel))
    return group if left else None


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a task on this rank; every rank makes one.

    Attributes:
        stages: This rank's, with the task's adapter attached.
        parallel: Where this rank stands; records are shared out over data-parallel ranks.
        communicator: This rank's transfers.
        trials: Tries the largest pass first; None: memory cannot run out, or only where a pass recovers from it.
        task: The task.
    """

    stages: Stages
    parallel: Parallel
    communicator: Communicator
    trials: Trials | None
    task: TaskState

    @property
    def batch_size(self) -> int | None:
        """Most sequences of one pass; None is bound by tokens alone."""
        options = self.task.task.spec.eval
        return None if options is None else options.per_device_eval_batch_size

    def evaluate(self, dataset: Records) -> EvalResult:
        """Evaluate the task on `dataset`; every rank calls it and every rank gets the answer.

        Only a group of records is in memory at a time, however long the file is.

        Raises:
            UserError: Some rank could not read the data, or has no memory for a sequence; on every rank, so none waits
                for another.
        """
        tokens = TOKENS_PER_PASS
        mine = range(self.parallel.dp_rank, len(dataset), self.parallel.dp_size)
        if self.parallel.experts.is_manager:
            mine = range(0)
        passes = PASSES_PER_STAGE * self.parallel.pp_size
        groups = _groups(map(dataset.candidates, mine), passes, self.batch_size)
        sums = torch.zeros(5, dtype=torch.float64, device=self.parallel.device)
        while (group := _next_together(groups, self.parallel)) is not None:
            found, tokens = self._in_memory(group, dataset.end_of_sequence, tokens)
            sums += found
        if self.parallel.world_size > 1:
            dist.all_reduce(sums)
        nll, labels, predicted, counted, likeliest = sums.tolist()
        share = likeliest / len(dataset) if dataset.distinct_completions else predicted / max(counted, 1.0)
        return EvalResult(nll / max(labels, 1.0), share, len(dataset))

    def _in_memory(self, group: list[_Record], end_of_sequence: int, tokens: int) -> tuple[Tensor, int]:
        """Evaluate a group in passes as large as fit into memory on every rank; every rank calls it.

        Args:
            group: Its records.
            end_of_sequence: See `EvaluationCompute`.
            tokens: Most tokens of a pass to begin with.

        Returns:
            See `_sums`; and the most tokens of a pass that fitted.

        Raises:
            SharedError: One sequence at a time does not fit.
        """
        sequences = sum(len(candidates) for candidates, _ in group)
        while True:
            batches = self._passes(group, tokens)
            rows = max((batch.rows for batch in batches), default=0)
            failed = self._tried(batches, sequences)
            if self.trials is None or not self._is_out_of_memory(failed):
                failed = FailedBuckets(1, self.stages.values(), self.parallel)
                compute = EvaluationCompute(self.stages, batches, sequences, end_of_sequence, failed)
                self._execute(compute)
                if not self._is_out_of_memory(failed):
                    return self._sums(group, compute.sums), tokens
            if tokens == 1:
                raise SharedError(f"one sequence alone ran out of memory ({failed.everywhere()[0]})")
            tokens = max(1, min(tokens, int(self.parallel.most([rows])[0])) // 2)

    def _tried(self, batches: Sequence[MicroBatch], sequences: int) -> FailedBuckets:
        """Whether a group's passes run out of memory on this rank, unless passes as large have fitted."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers=False)
        if self.trials is None or not batches:
            return failed
        size = max(batch.rows for batch in batches), max(batch.labels.numel() for batch in batches)
        before = self.trials.evaluated
        largest = max(size[0], before[0]), max(size[1], before[1])
        if largest != before:
            compute = partial(EvaluationCompute, self.stages, batches, sequences, 0, failed)
            self.trials.run(failed, lambda: self._execute(compute()))
            if not failed:
                self.trials.evaluated = largest
        return failed

    def _is_out_of_memory(self, failed: FailedBuckets) -> bool:
        """Whether some rank ran out of memory; every rank calls it."""
        return self.parallel.total([bool(failed)])[0] > 0

    def _execute(self, compute: EvaluationCompute) -> None:
        """Run this rank's passes."""
        ranks, each = self.parallel.pp_size, len(self.stages)
        dtype = next(iter(self.stages.values())).dtype
        template = forward_only(ranks, len(compute.batches), each)
        execute(template, self.parallel.pp_rank, compute, self.communicator, dtype, stages=ranks * each)

    def _sums(self, group: list[_Record], sums: Tensor) -> Tensor:
        """Add up what was found of a group.

        Args:
            group: Records of this pipeline.
            sums: See `EvaluationCompute`.

        Returns:
            `[5]` fp64: over the records' own sequences the negative log-likelihood, labels, labels predicted and labels
            that are no end-of-sequence; and the records whose own candidate is the likeliest. Zeros on ranks that do
            not speak for their pipeline, so that the sum over all ranks counts every record once.
        """
        if not group or not self.parallel.is_last_stage or self.parallel.tp_rank != 0:
            return torch.zeros(5, dtype=torch.float64, device=self.parallel.device)
        table = sums.view(len(group), -1, 4)  # [record, candidate, ...]
        own = torch.tensor([own for _, own in group], device=table.device)
        chosen = table[torch.arange(len(group), device=table.device), own].sum(dim=0)
        likeliest = (table[:, :, 0].argmin(dim=1) == own).sum(dim=0, keepdim=True)
        return torch.cat([chosen, likeliest.double()])

    def _passes(self, group: list[_Record], max_tokens: int) -> list[MicroBatch]:
        """A group's micro-batches of at most `max_tokens` (a longer sequence has its own) and `batch_size`; as many on
        every rank where ranks keep in step.
        """
        examples = [example for candidates, _ in group for example in candidates]
        batches: list[MicroBatch] = []
        current: list[PackedSequence] = []
        tokens = 0
        for i, example in enumerate(examples):
            length = len(example.tokens)
            if current and (tokens + length > max_tokens or len(current) == self.batch_size):
                batches.append(self._pack(current))
                current, tokens = [], 0
            current.append((self.task.task.spec.name, i, example.tokens, example.labelled, 1.0))
            tokens += length
        if current:
            batches.append(self._pack(current))
        if next(iter(self.stages.values())).in_step:
            passes = int(self.parallel.most([len(batches)])[0])
            batches += [self._pack([]) for _ in range(passes - len(batches))]
        return batches

    def _pack(self, sequences: list[PackedSequence]) -> MicroBatch:
        name = self.task.task.spec.name
        steps, offsets = {name: self.task.step}, {name: self.task.position_offset}
        multiple = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        slots = {name: self.task.slot}
        host = layout.pack(sequences, (name,), steps, offsets, multiple, training=False, slots=slots)
        return host.to(self.parallel.device)
