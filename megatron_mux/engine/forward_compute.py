"""What a stage computes where nothing is learned: forward passes, of which the last stage keeps figures or tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.engine.out_of_memory import FailedBuckets, Stages, zeros_for_next_stage
from megatron_mux.engine.trial import Trials
from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.template import forward_only
from megatron_mux.runtime import Parallel

T = TypeVar("T")


class ForwardCompute(ABC):
    """Forward passes of micro-batches over this rank's stages.

    Args:
        stages: This rank's.
        batches: Micro-batches in order.
        failed: Notes passes that run out of memory.
    """

    def __init__(self, stages: Stages, batches: Sequence[PackedBatch], failed: FailedBuckets) -> None:
        self.stages = stages
        self.failed = failed
        self.batches = batches
        stage = next(iter(stages.values()))
        rows = max((stage.hidden_shape(batch)[0] for batch in batches), default=1)
        self._zeros = zeros_for_next_stage(stages, rows, failed)

    @abstractmethod
    def find(self, number: int, batch: PackedBatch, backbone: Backbone, output: Tensor) -> None:
        """Compute and keep what is wanted of the last stage's output.

        Args:
            number: Of the micro-batch, which may have no rows.
            output: What the last layer returned.
        """

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        return self.stages[action.stage].hidden_shape(self.batches[action.micro_batch])

    def needs_gradient(self, action: Action) -> bool:
        """There is none."""
        return False

    @torch.no_grad()
    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, anything of their shape once memory has run out; on the last stage figures are kept too."""
        made = self.failed.attempt(action, lambda: self._forward(action, hidden))
        if made is not None:
            return made
        return self._zeros[: self.shape(action)[0]] if hidden is None else hidden

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        backbone, batch = self.stages[action.stage], self.batches[action.micro_batch]
        with activate(batch):
            output = backbone.forward(batch, hidden, labelled_only=True)
            if (
                backbone.last
            ):  # also without rows: where weights are sharded, ranks gather those of the head together
                self.find(action.micro_batch, batch, backbone, output)
        return output

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """There is none."""
        raise RuntimeError(f"a forward pass alone has no backward pass, yet {action} was asked for")

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """There is no gradient."""
        raise RuntimeError(f"a forward pass alone ends no bucket's step, yet {action} was asked for")

    update = norm

    def label(self, action: Action) -> str:
        """Tasks of the micro-batch."""
        return "eval " + "+".join(self.batches[action.micro_batch].task_rows)


class LabelCompute(ForwardCompute):
    """Keeps something of how likely labels are, and of the likeliest tokens in their places."""

    def find(self, number: int, batch: PackedBatch, backbone: Backbone, output: Tensor) -> None:
        """See `ForwardCompute.find`."""
        nll, tokens = backbone.predict(output, batch)
        if batch.rows:
            self.keep(number, batch, nll, tokens)

    @abstractmethod
    def keep(self, number: int, batch: PackedBatch, nll: Tensor, tokens: Tensor) -> None:
        """Keep what the last stage found.

        Args:
            number: Of the micro-batch.
            nll: `[N]` fp32 negative log-likelihoods of its labels.
            tokens: `[N]` int64, the likeliest token in the place of each.
        """


@dataclass(frozen=True)
class PassRunner:
    """Runs forward passes on this rank; every rank makes one.

    Attributes:
        stages: This rank's, with the tasks' adapters attached.
        parallel: Where this rank stands; data-parallel ranks share the sequences.
        communicator: This rank's transfers.
        trials: Tries the largest passes first; None: memory cannot run out, or only where a pass recovers from it.
    """

    stages: Stages
    parallel: Parallel
    communicator: Communicator
    trials: Trials | None = None

    @property
    def in_step(self) -> bool:
        """Whether all ranks must make the same number of passes."""
        return next(iter(self.stages.values())).in_step

    @property
    def multiple(self) -> int:
        """The rows of a micro-batch are padded to a multiple of this."""
        return self.parallel.tp_size if self.parallel.sequence_parallel else 1

    def as_many_everywhere(self, groups: list[list[T]]) -> list[list[T]]:
        """What is computed in each pass, with empty passes where other ranks have more and all keep in step.

        Every rank calls it.
        """
        if not self.in_step:
            return groups
        most = int(self.parallel.most([len(groups)])[0])
        return groups + [[] for _ in range(most - len(groups))]

    def run(self, compute: ForwardCompute) -> None:
        """Run this rank's passes of micro-batches, the same number on every rank of the pipeline."""
        ranks, each = self.parallel.pp_size, len(self.stages)
        dtype = next(iter(self.stages.values())).dtype
        template = forward_only(ranks, len(compute.batches), each)
        execute(template, self.parallel.pp_rank, compute, self.communicator, dtype, stages=ranks * each)


class EvaluationCompute(LabelCompute):
    """Keeps, per sequence, the likelihood of its labels and how many were predicted.

    Args:
        stages: This rank's.
        batches: Micro-batches in order.
        ends: `[sequences]` int64, the token of each sequence that is left out of the accuracy: end-of-sequence.
        failed: Notes passes that run out of memory.

    Attributes:
        sums: `[sequences, 4]` fp64 of each sequence: the summed negative log-likelihood, labels, labels predicted, and
            labels that are no end-of-sequence.
    """

    def __init__(
        self, stages: Stages, batches: Sequence[PackedBatch], ends: Tensor, failed: FailedBuckets
    ) -> None:
        super().__init__(stages, batches, failed)
        self.ends = ends
        self.sums: Tensor = torch.zeros(len(ends), 4, dtype=torch.float64, device=ends.device)

    def keep(self, number: int, batch: PackedBatch, nll: Tensor, tokens: Tensor) -> None:
        """See `LabelCompute.keep`."""
        sequences = batch.labelled.groups.sequence_ids
        counted = batch.labels != self.ends.index_select(0, sequences)
        columns = (nll, torch.ones_like(nll), (tokens == batch.labels) & counted, counted)
        rows = torch.stack([column.double() for column in columns], dim=1)
        self.sums.index_add_(0, sequences, rows)


class GenerationCompute(LabelCompute):
    """Keeps the likeliest next token of every sequence.

    Attributes:
        tokens: Of each micro-batch, `[sequences]` int64 in row order; on the last stage only.
    """

    def __init__(self, stages: Stages, batches: Sequence[PackedBatch], failed: FailedBuckets) -> None:
        super().__init__(stages, batches, failed)
        stage = next(iter(stages.values()))
        self.tokens = [
            torch.zeros(len(batch.segments), dtype=torch.int64, device=stage.device) for batch in batches
        ]

    def keep(self, number: int, batch: PackedBatch, nll: Tensor, tokens: Tensor) -> None:
        """See `LabelCompute.keep`."""
        self.tokens[number] = tokens
