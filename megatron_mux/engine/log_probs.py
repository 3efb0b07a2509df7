"""Log-probabilities of sequences, with a task's adapter and with its reference, over the pipeline that trains it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import layout
from megatron_mux.data.tokenise import Example
from megatron_mux.engine.agreement import raise_on_every_rank
from megatron_mux.engine.compute import Stages
from megatron_mux.engine.forward_compute import ForwardCompute, PassRunner
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.task_state import TaskState
from megatron_mux.errors import SharedError, UserError
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.tasks.evaluation import filled

_AT_ONCE = 512
"""Sequences in host memory at a time."""


class _Sums(ForwardCompute):
    """Keeps the summed negative log-likelihood of each sequence, `[n]` fp64."""

    def __init__(
        self, stages: Stages, batches: Sequence[MicroBatch], sequences: int, failed: FailedBuckets
    ) -> None:
        super().__init__(stages, batches, failed)
        device = next(iter(stages.values())).device
        self.sums: Tensor = torch.zeros(sequences, dtype=torch.float64, device=device)

    def keep(self, number: int, batch: MicroBatch, nll: Tensor, tokens: Tensor) -> None:
        """See `ForwardCompute.keep`."""
        self.sums.index_add_(0, batch.labelled.groups.sequence_ids, nll.double())


@dataclass(frozen=True)
class LogProbs(PassRunner):
    """Computes a task's log-probabilities; sequences are shared out over data-parallel ranks.

    Attributes:
        task: The task.
        batch_size: Most sequences of a pass, those of the reference included; None is bound by tokens alone.
    """

    task: TaskState = field(kw_only=True)
    batch_size: int | None = field(default=None, kw_only=True)

    def on_last_stage(self, examples: Sequence[Example]) -> Tensor:
        """Compute without a host sync. Every rank calls it.

        Args:
            examples: The sequences of all pipelines.

        Returns:
            `[2, n]` fp64: with the task's adapter, and with its reference. Valid on the last stage.

        Raises:
            torch.OutOfMemoryError: There is no memory for a pass.
        """
        sums, _ = self._computed(examples, policy=True, recovers=False)
        if self.parallel.dp_size > 1 and self.parallel.is_last_stage:
            dist.all_reduce(sums, group=self.parallel.dp_group)
        return sums

    def everywhere(self, example: Callable[[int], Example], numbers: Sequence[int], policy: bool) -> Tensor:
        """Compute many sequences, some of which are read at a time. Every rank calls it, and waits.

        Args:
            example: Reads a sequence.
            numbers: Which.
            policy: With the adapter as well as with the reference.

        Returns:
            `[2, n]` fp64 in host memory of every rank: with the adapter (zeros unless `policy`), and with the reference
            (zeros if the loss has none).

        Raises:
            SharedError: Some rank could not read a sequence, or ran out of memory in a pass.
        """
        found = []
        for first in range(0, len(numbers), _AT_ONCE):
            examples, problem = list[Example](), ""
            try:
                examples = [example(number) for number in numbers[first : first + _AT_ONCE]]
            except UserError as error:
                problem = str(error)
            raise_on_every_rank(problem, self.parallel)
            found.append(self._everywhere(examples, policy))
        return torch.cat(found, dim=1)

    def _everywhere(self, examples: Sequence[Example], policy: bool) -> Tensor:
        sums, failed = self._computed(examples, policy, None)
        if self.parallel.total([bool(failed)])[0]:
            raise SharedError(f"a pass ran out of memory ({failed.everywhere()[0]})")
        if not self.parallel.is_last_stage or self.parallel.tp_rank:
            sums.zero_()
        if self.parallel.world_size > 1:
            dist.all_reduce(sums)
        return sums.cpu()

    def _computed(
        self, examples: Sequence[Example], policy: bool, recovers: bool | None
    ) -> tuple[Tensor, FailedBuckets]:
        """This pipeline's share of the log-probabilities; zeros elsewhere."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers)
        batches = self._passes(examples, policy)
        compute = _Sums(self.stages, batches, 2 * len(examples), failed)
        self.run(compute)
        return -compute.sums.view(2, -1), failed

    def _passes(self, examples: Sequence[Example], policy: bool) -> list[MicroBatch]:
        """This pipeline's micro-batches; as many on every rank where ranks keep in step."""
        size, rows = self.parallel.dp_size, len(self._rows(policy))
        together = math.inf if self.batch_size is None else self.batch_size // rows

        def of_pipeline(rank: int) -> list[list[int]]:
            tokens = lambda number: rows * len(examples[number].tokens)
            return list(filled(range(rank, len(examples), size), tokens, together=lambda _: together))

        groups = [of_pipeline(rank) for rank in range(size)]
        own = groups[self.parallel.dp_rank]
        if self.in_step:
            # Every rank knows all sequences: nothing is exchanged.
            own += [[] for _ in range(max(map(len, groups)) - len(own))]
        return [self._pack(examples, group, policy) for group in own]

    def _rows(self, policy: bool) -> list[int]:
        """The rows of a result that are computed."""
        return [0] * policy + [1] * self.task.task.spec.training.needs_reference

    def _pack(self, examples: Sequence[Example], group: Sequence[int], policy: bool) -> MicroBatch:
        task, names = self.task, (self.task.task.spec.name, self.task.reference_name)
        sequences: list[PackedSequence] = []
        for row in self._rows(policy):
            own = [(row * len(examples) + i, examples[i]) for i in group]
            sequences += [(names[row], number, one.tokens, one.labelled, 1.0) for number, one in own]
        steps = dict.fromkeys(names, task.step)
        slots = {names[0]: task.slot} | task.reference_slot
        offsets = {names[0]: task.position_offset, names[1]: task.reference_offset}
        host = layout.pack(sequences, names, steps, offsets, self.multiple, training=False, slots=slots)
        return host.to(self.parallel.device)


def kl_term(log_probs: Tensor) -> Tensor:
    """KTO's KL term, a scalar: the mean log-ratio of mismatched completions, not below zero.

    Args:
        log_probs: `[2, n]` of policy and reference.
    """
    term: Tensor = (log_probs[0] - log_probs[1]).mean().clamp(min=0)
    return term
