"""What a pipeline stage computes for a micro-batch: the backbone with its adapters, and on the last stage the loss."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_mux import layout
from megatron_mux.backbone.model import Backbone
from megatron_mux.layout import MicroBatch
from megatron_mux.pipeline.action import Action

BatchKey = tuple[int, int]  # (bucket, micro-batch)


class TrainingCompute:
    """Forward and backward of the micro-batches of one step.

    Args:
        backbone: This stage.
        batches: The step's micro-batches.
        tasks: Number of tasks of the step.
        last: Whether this is the last stage.
    """

    def __init__(
        self, backbone: Backbone, batches: Mapping[BatchKey, MicroBatch], tasks: int, last: bool
    ) -> None:
        self.backbone = backbone
        self.batches = batches
        self.last = last
        # Summed per task on the device; read once a step.
        self.losses: Tensor = torch.zeros(tasks, dtype=torch.float64, device=backbone.device)

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        return self.backbone.hidden_shape(self._batch(action))

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, or the step's share of the loss on the last stage."""
        batch = self._batch(action)
        with layout.activate(batch):
            output = self.backbone.forward(batch, hidden, labelled_only=True)
            if not self.last:
                return output
            loss, nll = self.backbone.loss(output, batch)
        self.losses.index_add_(0, batch.label_tasks, (nll * batch.label_weights).double())
        return loss

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate to the adapters and to the stage's input."""
        if not output.requires_grad:
            return  # a first stage without adapters
        with layout.activate(self._batch(action)):
            torch.autograd.backward((output,), (gradient,))

    def label(self, action: Action) -> str:
        """Tasks of the micro-batch."""
        return "+".join(self._batch(action).task_rows)

    def _batch(self, action: Action) -> MicroBatch:
        return self.batches[(action.bucket, action.micro_batch)]


class EvaluationCompute:
    """Forward passes that keep, per labelled token, its negative log-likelihood and whether it was predicted.

    Args:
        backbone: This stage.
        batches: Micro-batches in order.
        sequences: Number of sequences over all of them.
        last: Whether this is the last stage.
        end_of_sequence: Token id left out of the accuracy.
    """

    def __init__(
        self, backbone: Backbone, batches: list[MicroBatch], sequences: int, last: bool, end_of_sequence: int
    ) -> None:
        self.backbone = backbone
        self.batches = batches
        self.last = last
        self.end_of_sequence = end_of_sequence
        # [sequence, (sum of nll, labels, predicted, labels that are not end-of-sequence)]
        self.sums: Tensor = torch.zeros(sequences, 4, dtype=torch.float64, device=backbone.device)

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        return self.backbone.hidden_shape(self.batches[action.micro_batch])

    @torch.no_grad()
    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states; on the last stage the sums are kept too."""
        batch = self.batches[action.micro_batch]
        with layout.activate(batch):
            output = self.backbone.forward(batch, hidden, labelled_only=True)
            if not self.last:
                return output
            nll, best = self.backbone.predict(output, batch)
        counted = batch.labels != self.end_of_sequence
        columns = (nll, torch.ones_like(nll), (best == batch.labels) & counted, counted)
        rows = torch.stack([column.double() for column in columns], dim=1)
        self.sums.index_add_(0, batch.sequence_ids[batch.label_rows], rows)
        return output

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Evaluation has none."""
        raise RuntimeError(f"an evaluation has no backward pass, yet {action} was asked for")

    def label(self, action: Action) -> str:
        """Tasks of the micro-batch."""
        return "eval " + "+".join(self.batches[action.micro_batch].task_rows)
