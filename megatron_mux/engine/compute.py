"""What a pipeline stage computes for a micro-batch: the backbone with its adapters, and on the last stage the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mux import layout
from megatron_mux.backbone.model import Backbone
from megatron_mux.engine.batches import Batches
from megatron_mux.engine.bucket_finalizer import LOSS_SQUARE_LACK, BucketFinalizer
from megatron_mux.engine.out_of_memory import Shortage
from megatron_mux.layout import MicroBatch
from megatron_mux.pipeline.action import Action, Unit

Stages = Mapping[int, Backbone]
"""A rank's stages by their number."""


class TrainingCompute:
    """Forward and backward of the units of one or several steps, and the ends of their buckets.

    Args:
        stages: This rank's.
        batches: For each unit, a batch for each hybrid task in it: computed one after the other.
        ends: Of the buckets' steps.
    """

    def __init__(self, stages: Stages, batches: Batches, ends: BucketFinalizer) -> None:
        self.stages = stages
        self.batches = batches
        self.ends = ends
        self.shortage = ends.shortage
        # Summed per bucket's step and task on the device. A row each: a task's NaN is its own.
        shape = (len(ends.tokens) * len(ends.buckets), len(ends.running))
        self.losses: Tensor = torch.zeros(shape, dtype=torch.float64, device=ends.parallel.device)
        self._outputs: dict[tuple[int, Unit], list[Tensor]] = {}
        one = next(iter(stages.values()))
        rows = batches.most_rows if 0 in stages and not stages[0].last else 1
        self._nothing = torch.zeros(rows, 1, one.shape.hidden, dtype=one.dtype, device=one.device)

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        if not action.is_pass:
            return len(self.ends.bucket(action.bucket).tasks), LOSS_SQUARE_LACK
        backbone, batches = self.stages[action.stage], self.batches[action.unit]
        rows = sum(backbone.hidden_shape(batch)[0] for batch in batches)
        return (rows, *backbone.hidden_shape(batches[0])[1:])

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, or the step's share of the loss on the last stage; zeros for want of memory."""
        made = self.shortage.attempt(
            action, lambda: self._together(action, hidden), lambda: (self._again(action),)
        )
        if made is not None:
            return made
        self._outputs.pop((action.stage, action.unit), None)
        if self.stages[action.stage].last:
            return self._nothing[0, 0, 0]
        # What is there already: zeros must not want for memory, too.
        return self._nothing[: self.shape(action)[0]] if hidden is None else hidden.detach().zero_()

    def _again(self, action: Action) -> Callable[[], Tensor]:
        """The forward pass for its messages alone, whatever came in."""
        shape, stage = self.shape(action), self.stages[action.stage]  # laid out by now, by real numbers

        def forward() -> Tensor:
            options: Any = {"dtype": stage.dtype, "device": stage.device, "requires_grad": True}
            return self._together(action, torch.empty(shape, **options) if action.stage else None)

        return forward

    def _together(self, action: Action, hidden: Tensor | None) -> Tensor:
        """The batches of a unit, one after the other."""
        backbone, batches = self.stages[action.stage], self.batches[action.unit]
        if len(batches) == 1:
            return self._forward(action, batches[0], hidden)
        sizes = [backbone.hidden_shape(batch)[0] for batch in batches]
        parts: Sequence[Tensor | None] = [None] * len(batches)
        if hidden is not None:
            parts = hidden.split(sizes)
        outputs = [self._forward(action, batch, part) for batch, part in zip(batches, parts, strict=True)]
        self._outputs[action.stage, action.unit] = outputs
        # Each batch is back-propagated by itself, below.
        with torch.no_grad():
            return torch.stack(outputs).sum() if backbone.last else torch.cat(outputs)

    def _forward(self, action: Action, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        backbone = self.stages[action.stage]
        with layout.activate(batch):
            output = backbone.forward(batch, hidden, labelled_only=True)
            if not backbone.last:
                return output
            loss, nll = backbone.loss(output, batch)
        self.losses[action.bucket].index_add_(0, batch.label_tasks, (nll * batch.label_weights).double())
        return loss

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate to the adapters and to the stage's input, unless memory is wanting."""
        outputs = self._outputs.pop((action.stage, action.unit), [output])
        self.shortage.attempt(
            action,
            lambda: self._back(action, outputs, gradient),
            lambda: (self._again(action), lambda made: self._back_again(action, made)),
        )
        if self.shortage.concerns(action.bucket):
            # What there is of gradients will not be needed.
            for name in self.ends.bucket(action.bucket).tasks:
                self.ends.running[name].optimizer.zero()
        if action.stage == min(self.stages):  # the last on this rank to be back-propagated
            self.batches.forget(action.unit)

    def _back_again(self, action: Action, output: Tensor) -> None:
        """The backward pass for its messages alone."""
        outputs = self._outputs.pop((action.stage, action.unit), [output])
        gradient = None if self.stages[action.stage].last else torch.empty_like(output)
        self._back(action, outputs, gradient)

    def _back(self, action: Action, outputs: Sequence[Tensor], gradient: Tensor | None) -> None:
        batches = self.batches[action.unit]
        gradients: Sequence[Tensor | None] = [None] * len(outputs)
        if gradient is not None:
            gradients = [gradient] if len(outputs) == 1 else gradient.split([o.shape[0] for o in outputs])
        for batch, out, own in zip(batches, outputs, gradients, strict=True):
            if out.requires_grad:  # not on a first stage without adapters
                with layout.activate(batch):
                    torch.autograd.backward((out,), (own,))
            if batch.carry is not None:
                batch.carry.forget(batch.segments, self.stages[action.stage].layers)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """What the bucket's tasks lost, and how long their gradients are, from this stage on."""
        return self.ends.norm(action, self.losses[action.bucket], others)

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Let the bucket's tasks step."""
        return self.ends.update(action.bucket, whole)

    def label(self, action: Action) -> str:
        """Tasks of the bucket."""
        own = self.batches.label(action) if action.is_pass else ""
        return own or self.ends.bucket(action.bucket).label


class EvaluationCompute:
    """Forward passes that keep, per labelled token, its negative log-likelihood and whether it was predicted.

    Args:
        stages: This rank's.
        batches: Micro-batches in order.
        sequences: Number of sequences over all of them.
        end_of_sequence: Token id left out of the accuracy.
        shortage: What lacks memory here.
    """

    def __init__(
        self,
        stages: Stages,
        batches: list[MicroBatch],
        sequences: int,
        end_of_sequence: int,
        shortage: Shortage,
    ) -> None:
        self.stages = stages
        self.shortage = shortage
        self.batches = batches
        self.end_of_sequence = end_of_sequence
        # [sequence, (sum of nll, labels, predicted, labels that are not end-of-sequence)]
        device = next(iter(stages.values())).device
        self.sums: Tensor = torch.zeros(sequences, 4, dtype=torch.float64, device=device)
        one = next(iter(stages.values()))
        rows = [one.hidden_shape(batch)[0] for batch in batches] if 0 in stages and not one.last else []
        self._nothing = torch.zeros(max(rows, default=1), 1, one.shape.hidden, dtype=one.dtype, device=device)

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        return self.stages[action.stage].hidden_shape(self.batches[action.micro_batch])

    @torch.no_grad()
    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, anything for want of memory; on the last stage the sums are kept too."""
        made = self.shortage.attempt(
            action, lambda: self._forward(action, hidden), lambda: (lambda: self._again(action),)
        )
        if made is not None:
            return made
        return self._nothing[: self.shape(action)[0]] if hidden is None else hidden

    def _again(self, action: Action) -> Tensor:
        """The forward pass for its messages alone: whatever came in."""
        stage = self.stages[action.stage]
        hidden = torch.empty(self.shape(action), dtype=stage.dtype, device=stage.device)
        return self._forward(action, hidden if action.stage else None)

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
