"""Log-probabilities of sequences, with a task's adapter and with its reference, over the pipeline that trains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import layout
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.tokenise import Example
from megatron_mux.engine.agreement import first_problem
from megatron_mux.engine.compute import Stages
from megatron_mux.engine.forward_compute import ForwardCompute, run_forward
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.task_state import TaskState
from megatron_mux.errors import SharedError
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS

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
class LogProbs:
    """Computes log-probabilities on this rank; every rank makes one.

    Attributes:
        stages: This rank's, with the task's adapter attached.
        parallel: Where this rank stands; sequences are shared out over data-parallel ranks.
        communicator: This rank's transfers.
        task: The task.
    """

    stages: Stages
    parallel: Parallel
    communicator: Communicator
    task: TaskState

    def on_last_stage(
        self, examples: Sequence[Example], policy: bool, recovers: bool | None = False
    ) -> Tensor:
        """Compute without a host sync. Every rank calls it.

        Args:
            examples: The sequences of all pipelines.
            policy: With the task's adapter as well as with its reference.
            recovers: See `FailedBuckets`.

        Returns:
            `[2, n]` fp64: with the adapter (zeros unless `policy`), and with the reference. Valid on the last stage.

        Raises:
            torch.OutOfMemoryError: There is no memory for a pass, and it is not recovered from.
        """
        sums, _ = self._computed(examples, policy, recovers)
        if self.parallel.dp_size > 1 and self.parallel.is_last_stage:
            dist.all_reduce(sums, group=self.parallel.dp_group)
        return sums

    def everywhere(self, examples: Sequence[Example], policy: bool) -> Tensor:
        """The same in host memory of every rank, which waits for it.

        Raises:
            SharedError: Some rank has no memory for a pass.
        """
        sums, failed = self._computed(examples, policy, None)
        if self.parallel.total([bool(failed)])[0]:
            problem = failed.everywhere()[0]
            raise SharedError(first_problem(f"a pass ran out of memory ({problem})", self.parallel))
        if not self.parallel.is_last_stage or self.parallel.tp_rank:
            sums.zero_()
        if self.parallel.world_size > 1:
            dist.all_reduce(sums)
        return sums.cpu()

    def of_data(self, data: PreferenceDataset) -> Tensor:
        """`[n]` fp64 in host memory: all sequences of a data set with the reference. Every rank calls it.

        Raises:
            UserError: The data could not be read, or some rank has no memory for a pass.
        """
        found = []
        for first in range(0, len(data), _AT_ONCE):
            examples = [data[i] for i in range(first, min(first + _AT_ONCE, len(data)))]
            found.append(self.everywhere(examples, policy=False)[1])
        return torch.cat(found)

    def _computed(
        self, examples: Sequence[Example], policy: bool, recovers: bool | None
    ) -> tuple[Tensor, FailedBuckets]:
        """This pipeline's share of the log-probabilities; zeros elsewhere."""
        failed = FailedBuckets(1, self.stages.values(), self.parallel, recovers)
        batches = self._passes(examples, policy)
        compute = _Sums(self.stages, batches, 2 * len(examples), failed)
        run_forward(compute, self.parallel, self.communicator)
        return -compute.sums.view(2, -1), failed

    def _passes(self, examples: Sequence[Example], policy: bool) -> list[MicroBatch]:
        """This pipeline's micro-batches; as many on every rank where ranks keep in step."""
        groups = list(self._groups(examples, 1 + policy))
        batches = [self._pack(examples, group, policy) for group in groups]
        if next(iter(self.stages.values())).in_step:
            passes = int(self.parallel.most([len(batches)])[0])
            batches += [self._pack(examples, [], policy) for _ in range(passes - len(batches))]
        return batches

    def _groups(self, examples: Sequence[Example], copies: int) -> Iterator[list[int]]:
        """Numbers of this pipeline's sequences, as many at a time as fit into a pass."""
        group: list[int] = []
        tokens = 0
        for number in range(self.parallel.dp_rank, len(examples), self.parallel.dp_size):
            length = copies * len(examples[number].tokens)
            if group and tokens + length > TOKENS_PER_PASS:
                yield group
                group, tokens = [], 0
            group.append(number)
            tokens += length
        if group:
            yield group

    def _pack(self, examples: Sequence[Example], group: Sequence[int], policy: bool) -> MicroBatch:
        task, names = self.task, (self.task.task.spec.name, self.task.reference_name)
        sequences: list[PackedSequence] = []
        for row, name in enumerate(names):
            if row or policy:
                own = [(row * len(examples) + i, examples[i]) for i in group]
                sequences += [(name, number, one.tokens, one.labelled, 1.0) for number, one in own]
        steps = dict.fromkeys(names, task.step)
        multiple = self.parallel.tp_size if self.parallel.sequence_parallel else 1
        slots = {names[0]: task.slot} | task.reference_slot
        offsets = {names[0]: task.position_offset, names[1]: task.reference_offset}
        host = layout.pack(sequences, names, steps, offsets, multiple, training=False, slots=slots)
        return host.to(self.parallel.device)


def kl_term(log_probs: Tensor) -> Tensor:
    """KTO's KL term, a scalar: the mean log-ratio of mismatched completions, not below zero.

    Args:
        log_probs: `[2, n]` of policy and reference.
    """
    term: Tensor = (log_probs[0] - log_probs[1]).mean().clamp(min=0)
    return term
