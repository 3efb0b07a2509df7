"""Held-out figures of several tasks at once, over the same pipeline that trains them, a group of records at a time.

Sequences of all tasks are packed together like those of a step, so that small evaluations share passes: their weights
are fetched once, and the pipeline drains once a group. A task's figures depend on its own records alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.evaluation.held_out import HeldOut, HeldOutRecord, RecordGroups
from megatron_mux.engine.forward_compute import EvaluationCompute, PassRunner
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.errors import SharedError
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS, filled, plain_choices, tokens_per_pass

# Passes of one group, times the stages: the pipeline drains between groups, and these keep that rare.
PASSES_PER_STAGE = 8

_SUMS = 5  # see `Evaluator._sums`


@dataclass(frozen=True)
class Sample:
    """What a task generates on a held-out prompt, as text.

    Attributes:
        completion: What was generated.
        reference: The record's own completion.
    """

    prompt: str
    completion: str
    reference: str


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation of a task found.

    Attributes:
        values: Each figure by its name, which `eval_` precedes in `metrics.jsonl`: `loss`, the mean negative
            log-likelihood over labelled tokens, and the task's metrics (see `EvalSpec`).
        records: Records evaluated.
        choices: Number of completions that each record was classified among; 0: records were not classified.
        samples: Generated texts.
        notes: What a reader should know of these.
    """

    values: Mapping[str, float]
    records: int
    choices: int = 0
    samples: tuple[Sample, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood over labelled tokens."""
        return self.values["loss"]

    @property
    def accuracy(self) -> float | None:
        """The first accuracy that was measured."""
        names = ("accuracy", "classification_accuracy", "token_accuracy")
        return next((self.values[name] for name in names if name in self.values), None)


@dataclass(frozen=True)
class Evaluator(PassRunner):
    """Evaluates tasks; records are shared out over data-parallel ranks."""

    def evaluate(self, tasks: Sequence[HeldOut]) -> dict[str, EvalResult | SharedError]:
        """Evaluate tasks together; every rank calls it and every rank gets the answer.

        Only a group of records is in memory at a time, however long the files are.

        Args:
            tasks: In the same order on every rank.

        Returns:
            By task, its figures; or why there are none: some rank has no memory for one of its sequences.
        """
        members = {task.name: task for task in tasks}
        passes = PASSES_PER_STAGE * self.parallel.pp_size
        groups = RecordGroups(tasks, self.parallel, passes * TOKENS_PER_PASS, passes)
        sums = torch.zeros(len(tasks), _SUMS, dtype=torch.float64, device=self.parallel.device)
        tokens = TOKENS_PER_PASS
        while (group := groups.next()) is not None:
            try:
                figures, tokens = self._in_memory(members, group, tokens)
                sums += figures
            except SharedError:
                for name in members:  # on every rank
                    if name in groups.problems:
                        continue
                    try:
                        of_task = [record for record in group if record.task == name]
                        sums += self._in_memory(members, of_task, 1)[0]
                    except SharedError as error:
                        groups.problems[name] = str(error)
        if self.parallel.world_size > 1:
            dist.all_reduce(sums)
        return {
            task.name: SharedError(groups.problems[task.name])
            if task.name in groups.problems
            else _result(task, row)
            for task, row in zip(tasks, sums.tolist(), strict=True)
        }

    def _in_memory(
        self, members: Mapping[str, HeldOut], group: list[HeldOutRecord], tokens: int
    ) -> tuple[Tensor, int]:
        """Evaluate a group in passes as large as fit into memory on every rank; every rank calls it.

        Args:
            members: All tasks, by name.
            group: Records of this pipeline.
            tokens: Most tokens of a pass to begin with.

        Returns:
            See `_sums`; and the most tokens of a pass that fitted.

        Raises:
            SharedError: One sequence at a time does not fit.
        """
        ends = [members[record.task].records.end_of_sequence for record in group for _ in record.examples]
        while True:
            batches = self._passes(members, group, tokens)
            rows = max((batch.rows for batch in batches), default=0)
            failed = self._tried(batches, ends)
            if self.trials is None or not self._is_out_of_memory(failed):
                failed = FailedBuckets(1, self.stages.values(), self.parallel)
                compute = self._compute(batches, ends, failed)
                self.run(compute)
                if not self._is_out_of_memory(failed):
                    return self._sums(list(members), group, compute.sums), tokens
            if tokens == 1:
                raise SharedError(f"one sequence alone ran out of memory ({failed.everywhere()[0]})")
            tokens = max(1, min(tokens, int(self.parallel.most([rows])[0])) // 2)

    def _compute(
        self, batches: Sequence[PackedBatch], ends: Sequence[int], failed: FailedBuckets
    ) -> EvaluationCompute:
        on_device = torch.tensor(ends, dtype=torch.int64, device=self.parallel.device)
        return EvaluationCompute(self.stages, batches, on_device, failed)

    def _tried(self, batches: Sequence[PackedBatch], ends: Sequence[int]) -> FailedBuckets:
        """Whether a group's passes run out of memory on this rank, unless passes as large have fitted."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers=False)
        if self.trials is None or not batches:
            return failed
        size = max(batch.rows for batch in batches), max(batch.labels.numel() for batch in batches)
        before = self.trials.evaluated
        largest = max(size[0], before[0]), max(size[1], before[1])
        if largest != before:
            compute = partial(self._compute, batches, ends, failed)
            self.trials.run(failed, lambda: self.run(compute()))
            if not failed:
                self.trials.evaluated = largest
        return failed

    def _is_out_of_memory(self, failed: FailedBuckets) -> bool:
        """Whether some rank ran out of memory; every rank calls it."""
        return self.parallel.total([bool(failed)])[0] > 0

    def _sums(self, names: list[str], group: list[HeldOutRecord], sums: Tensor) -> Tensor:
        """Add up what was found of a group, task by task.

        Args:
            names: Of all tasks.
            group: Records of this pipeline.
            sums: See `EvaluationCompute`.

        Returns:
            `[tasks, 5]` fp64: over the records' own sequences the negative log-likelihood, labels, labels predicted and
            labels that are no end-of-sequence; and the records whose own candidate is the likeliest. Zeros on ranks
            that do not speak for their pipeline, so that the sum over all ranks counts every record once.
        """
        stats = torch.zeros(len(names), _SUMS, dtype=torch.float64, device=self.parallel.device)
        if not group or not self.parallel.is_last_stage or self.parallel.tp_rank != 0:
            return stats
        at = 0
        for i, name in enumerate(names):
            records = [record for record in group if record.task == name]
            if not records:
                continue
            count, each = len(records), len(records[0].examples)
            table = sums[at : at + count * each].view(count, each, 4)  # [record, candidate, ...]
            at += count * each
            correct = torch.tensor([record.own for record in records], device=table.device)
            stats[i, :4] = table[torch.arange(count, device=table.device), correct].sum(dim=0)
            stats[i, 4] = (table[:, :, 0].argmin(dim=1) == correct).sum()
        return stats

    def _passes(
        self, members: Mapping[str, HeldOut], group: list[HeldOutRecord], max_tokens: int
    ) -> list[PackedBatch]:
        """A group's micro-batches of at most `max_tokens` (a longer sequence has its own) and of as many sequences as
        each of their tasks allows; as many on every rank where ranks keep in step.
        """
        sequences = [
            PackedSequence(record.task, i, example.tokens, example.labelled, 1.0)
            for i, (record, example) in enumerate((r, e) for r in group for e in r.examples)
        ]
        total = sum(len(sequence.tokens) for sequence in sequences)
        groups = filled(
            sequences,
            lambda record: len(record.tokens),
            min(max_tokens, tokens_per_pass(total, self.parallel.pp_size)),
            lambda record: members[record.task].batch_size or math.inf,
        )
        return [self._pack(members, group) for group in self.as_many_everywhere(list(groups))]

    def _pack(self, members: Mapping[str, HeldOut], sequences: list[PackedSequence]) -> PackedBatch:
        host = pack(
            sequences,
            tuple(members),
            {name: task.task.step for name, task in members.items()},
            {name: task.task.position_offset for name, task in members.items()},
            self.multiple,
            training=False,
            slots={name: task.task.slot for name, task in members.items()},
        )
        return host.to(self.parallel.device)


def _result(task: HeldOut, sums: Sequence[float]) -> EvalResult:
    """The figures of a task.

    Args:
        sums: A row of what `Evaluator._sums` returns, over all records.
    """
    nll, labels, predicted, counted, likeliest = sums
    records, choices = len(task.records), len(task.choices or ())
    of_tokens, of_records = predicted / max(counted, 1.0), likeliest / max(records, 1)
    values = {"loss": nll / max(labels, 1.0)}
    for metric in task.metrics:
        if metric == "accuracy":
            values[metric] = of_records if plain_choices(task.records) else of_tokens
        elif metric == "token_accuracy":
            values[metric] = of_tokens
        elif metric == "classification_accuracy":
            values[metric] = of_records
        elif metric == "perplexity":
            values[metric] = _exp(values["loss"])
    return EvalResult(values, records, choices)


def _exp(value: float) -> float:
    """The exponential; infinite beyond what a number holds."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
