"""What a pipeline stage computes in an evaluation: forward passes that count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_mux import layout
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.training_compute import Stages, zeros_for_next_stage
from megatron_mux.layout import MicroBatch
from megatron_mux.pipeline.action import Action


class EvaluationCompute:
    """Forward passes that keep, per labelled token, its negative log-likelihood and whether it was predicted.

    Args:
        stages: This rank's.
        batches: Micro-batches in order.
        sequences: Number of sequences over all of them.
        end_of_sequence: Token id left out of the accuracy.
        failed: Notes passes that run out of memory.

    Attributes:
        sums: `[sequences, 4]` fp64 of each sequence: the summed negative log-likelihood, labels, labels predicted, and
            labels that are no end-of-sequence.
    """

    def __init__(
        self,
        stages: Stages,
        batches: Sequence[MicroBatch],
        sequences: int,
        end_of_sequence: int,
        failed: FailedBuckets,
    ) -> None:
        self.stages = stages
        self.failed = failed
        self.batches = batches
        self.end_of_sequence = end_of_sequence
        one = next(iter(stages.values()))
        self.sums: Tensor = torch.zeros(sequences, 4, dtype=torch.float64, device=one.device)
        rows = max((one.hidden_shape(batch)[0] for batch in batches), default=1)
        self._zeros = zeros_for_next_stage(stages, rows, failed)

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        return self.stages[action.stage].hidden_shape(self.batches[action.micro_batch])

    @torch.no_grad()
    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, anything of their shape once memory has run out; on the last stage the sums are kept too."""
        made = self.failed.attempt(action, lambda: self._forward(action, hidden))
        if made is not None:
            return made
        return self._zeros[: self.shape(action)[0]] if hidden is None else hidden

    def _forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        backbone, batch = self.stages[action.stage], self.batches[action.micro_batch]
        with layout.activate(batch):
            output = backbone.forward(batch, hidden, labelled_only=True)
            if not backbone.last:
                return output
            nll, best = backbone.predict(output, batch)
        if not batch.rows:
            return output
        counted = batch.labels != self.end_of_sequence
        columns = (nll, torch.ones_like(nll), (best == batch.labels) & counted, counted)
        rows = torch.stack([column.double() for column in columns], dim=1)
        self.sums.index_add_(0, batch.sequence_ids[batch.label_rows], rows)
        return output

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Evaluation has none."""
        raise RuntimeError(f"an evaluation has no backward pass, yet {action} was asked for")

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """Evaluation has no gradient."""
        raise RuntimeError(f"an evaluation ends no bucket's step, yet {action} was asked for")

    update = norm

    def label(self, action: Action) -> str:
        """Tasks of the micro-batch."""
        return "eval " + "+".join(self.batches[action.micro_batch].task_rows)
