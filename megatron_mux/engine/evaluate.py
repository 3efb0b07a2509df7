"""Held-out loss and accuracy of one task, over the same pipeline that trains it, a group of records at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import layout
from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.engine.agreement import first_problem
from megatron_mux.engine.batches import tensors
from megatron_mux.engine.compute import EvaluationCompute, Stages
from megatron_mux.engine.messages import Messages, largest_message
from megatron_mux.engine.out_of_memory import Shortage
from megatron_mux.engine.room import Room
from megatron_mux.errors import SharedError, UserError
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.template import forward_only
from megatron_mux.runtime import Parallel

# Tokens of one forward pass: large enough to use the processor well, small enough to bound activations.
TOKENS_PER_PASS = 2048
# Passes of one group, times the stages: the pipeline drains between groups, and these keep that rare.
PASSES_PER_STAGE = 8


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


def evaluate(
    stages: Stages,
    parallel: Parallel,
    communicator: Communicator,
    task: str,
    dataset: TaskDataset,
    position_offset: int,
    steps_done: int,
    room: Room,
    batch_size: int | None = None,
) -> EvalResult:
    """Evaluate `task` on `dataset`; every rank calls it and every rank gets the answer.

    Only a group of records is in memory at a time, however long the file is.

    Args:
        stages: This rank's, with the task's adapter attached.
        parallel: Where this rank stands; records are shared out over data-parallel ranks.
        communicator: This rank's transfers.
        task: The task's name.
        dataset: Held-out records.
        position_offset: The task's number of virtual tokens.
        steps_done: The task's optimizer steps so far.
        room: For messages of passes that find no memory.
        batch_size: Most sequences of one pass; None is bound by tokens alone.

    Returns:
        Loss and accuracy.

    Raises:
        UserError: Some rank could not read the data, or has no memory for a sequence; on every rank, so none waits
            for another.
    """
    rank = _Rank(stages, parallel, communicator, task, position_offset, steps_done, room, batch_size)
    tokens = TOKENS_PER_PASS
    mine = range(parallel.dp_rank, len(dataset), parallel.dp_size)
    groups = _groups(_read(dataset, mine), PASSES_PER_STAGE * parallel.pp_size, batch_size)
    sums = torch.zeros(5, dtype=torch.float64, device=parallel.device)
    while (group := _next_together(groups, parallel)) is not None:
        found, tokens = _in_memory(rank, group, dataset.end_of_sequence, tokens)
        sums += found
    if parallel.world_size > 1:
        dist.all_reduce(sums)
    nll, labels, predicted, counted, likeliest = sums.tolist()
    share = likeliest / len(dataset) if dataset.distinct_completions else predicted / max(counted, 1.0)
    return EvalResult(nll / max(labels, 1.0), share, len(dataset))


@dataclass(frozen=True)
class _Record:
    """One record to evaluate.

    Attributes:
        candidates: Its sequence; where records are to be classified, one with every completion of the file.
        own: Which of them has the record's own completion.
    """

    candidates: list[Example]
    own: int = 0


def _read(dataset: TaskDataset, numbers: range) -> Iterator[_Record]:
    """The records of `numbers`, each read when it is asked for."""
    for number in numbers:
        if not dataset.distinct_completions:
            yield _Record([dataset[number]])
            continue
        candidates = dataset.candidates(number)
        own = next(i for i, (_, is_own) in enumerate(candidates) if is_own)
        yield _Record([example for example, _ in candidates], own)


def _groups(records: Iterator[_Record], passes: int, batch_size: int | None) -> Iterator[list[_Record]]:
    """Records in their order, as many at a time as fill about so many passes; a record is never divided."""
    group: list[_Record] = []
    tokens = sequences = 0
    for record in records:
        group.append(record)
        tokens += sum(len(example.tokens) for example in record.candidates)
        sequences += len(record.candidates)
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


def _in_memory(rank: _Rank, group: list[_Record], end_of_sequence: int, tokens: int) -> tuple[Tensor, int]:
    """Evaluate a group in passes as large as memory has room for on every rank; every rank calls it.

    Args:
        rank: This one.
        group: Its records.
        end_of_sequence: See `EvaluationCompute`.
        tokens: Most tokens of a pass to begin with.

    Returns:
        See `_Rank.sums`; and the most tokens of a pass with which there was room.

    Raises:
        SharedError: There is none for one sequence at a time.
    """
    while True:
        batches = rank.passes(group, tokens)
        shortage = rank.shortage(batches)
        found = rank.sums(group, batches, end_of_sequence, shortage)
        largest = max((batch.rows for batch in batches), default=0)
        lacks, most = rank.parallel.most([shortage.concerns(0), largest])
        if not lacks:
            return found, tokens
        if tokens == 1:
            where = shortage.everywhere()[0]
            raise SharedError(f"one sequence alone ran out of memory ({where})")
        tokens = max(1, min(tokens, int(most)) // 2)


@dataclass(frozen=True)
class _Rank:
    """What evaluates a group on this rank; the attributes are the arguments of `evaluate`."""

    stages: Stages
    parallel: Parallel
    communicator: Communicator
    task: str
    position_offset: int
    steps_done: int
    room: Room
    batch_size: int | None

    def shortage(self, batches: list[MicroBatch]) -> Shortage:
        """What will lack memory in these passes."""
        rows = max((batch.rows for batch in batches), default=0)
        with suppress(torch.OutOfMemoryError):  # there may be room once a pass has failed and is gone
            self.room.take(max(self.room.size, largest_message(self.stages.values(), rows)))
        return Shortage(1, self.parallel, Messages(self.stages.values(), self.parallel, self.room))

    def sums(
        self, group: list[_Record], batches: list[MicroBatch], end_of_sequence: int, shortage: Shortage
    ) -> Tensor:
        """Evaluate a group.

        Args:
            group: Records of this pipeline.
            batches: Their passes.
            end_of_sequence: See `EvaluationCompute`.
            shortage: Told what lacks memory; then the sums are wrong.

        Returns:
            `[5]` fp64: over the records' own sequences the negative log-likelihood, labels, labels predicted and labels
            that are no end-of-sequence; and the records whose own candidate is the likeliest. Zeros on ranks that do
            not speak for their pipeline, so that the sum over all ranks counts every record once.
        """
        nothing = torch.zeros(5, dtype=torch.float64, device=self.parallel.device)
        if next(iter(self.stages.values())).residence.in_step:
            passes = int(self.parallel.most([len(batches)])[0])
            batches = batches + [self._pack([]) for _ in range(passes - len(batches))]
        sequences = sum(len(record.candidates) for record in group)
        compute = EvaluationCompute(self.stages, batches, sequences, end_of_sequence, shortage)
        ranks, each = self.parallel.pp_size, len(self.stages)
        dtype = next(iter(self.stages.values())).dtype
        template = forward_only(ranks, len(batches), each)
        execute(template, self.parallel.pp_rank, compute, self.communicator, dtype, stages=ranks * each)
        if not group or not self.parallel.is_last_stage or self.parallel.tp_rank != 0:
            return nothing
        table = compute.sums.view(len(group), -1, 4)  # [record, candidate, ...]
        own = torch.tensor([record.own for record in group], device=table.device)
        chosen = table[torch.arange(len(group), device=table.device), own].sum(dim=0)
        likeliest = (table[:, :, 0].argmin(dim=1) == own).sum(dim=0, keepdim=True)
        return torch.cat([chosen, likeliest.double()])

    def passes(self, group: list[_Record], most_tokens: int) -> list[MicroBatch]:
        """A group's micro-batches of at most `most_tokens` (a longer sequence has its own) and `batch_size`."""
        examples = [example for record in group for example in record.candidates]
        batches: list[MicroBatch] = []
        current: list[PackedSequence] = []
        tokens = 0
        for i, example in enumerate(examples):
            length = len(example.tokens)
            if current and (tokens + length > most_tokens or len(current) == self.batch_size):
                batches.append(self._pack(current))
                current, tokens = [], 0
            current.append((self.task, i, *tensors(example), 1.0))
            tokens += length
        return [*batches, self._pack(current)] if current else batches

    def _pack(self, sequences: list[PackedSequence]) -> MicroBatch:
        steps, offsets = {self.task: self.steps_done}, {self.task: self.position_offset}
        multiple = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        return layout.pack(
            sequences, (self.task,), steps, offsets, multiple, training=False, device=self.parallel.device
        )
