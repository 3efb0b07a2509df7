"""What a pipeline stage computes for a micro-batch: the backbone with its adapters, and in training the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_mux.backbone.exchange import Exchange
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.micro_batch import MicroBatch, activate
from megatron_mux.engine.batches import StepBatches
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.engine.interleaved import InterleavedPasses
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.part_times import PartTimes, PassTimes
from megatron_mux.kernels.loss.preference import RowScale
from megatron_mux.pipeline.action import Action, Unit
from megatron_mux.runtime import to_device

Stages = Mapping[int, Backbone]
"""A rank's stages by their number."""


def zeros_for_next_stage(stages: Stages, rows: int, failed: FailedBuckets) -> Tensor:
    """`[rows, 1, H]` zeros, allocated up front, for the first stage to send in place of an output that failed.

    Other stages overwrite what they received. One row where nothing like that is sent.
    """
    one = next(iter(stages.values()))
    sends = failed.recovers and 0 in stages and not stages[0].last
    return torch.zeros(rows if sends else 1, 1, one.shape.hidden, dtype=one.dtype, device=one.device)


class TrainingCompute:
    """Forward and backward of the units of one or several steps, and the ends of their buckets.

    Args:
        stages: This rank's.
        batches: For each unit, a batch for each hybrid task in it (or half of one).
        finalizer: Of the buckets' steps.
        exchange: Carries messages that other hybrid tasks' computation hides.
        copied: On a GPU, the end of a copy of optimizers' state, which they await before they step.

    Attributes:
        times: Takes the times of pieces and messages; None: nobody wants to know them.
    """

    def __init__(
        self,
        stages: Stages,
        batches: StepBatches,
        finalizer: BucketFinalizer,
        exchange: Exchange,
        copied: torch.cuda.Event | None = None,
    ) -> None:
        self.copied = copied
        self.times: PartTimes | None = None
        self.exchange = exchange
        self.stages = stages
        self.batches = batches
        self.finalizer = finalizer
        self.failed = finalizer.failed
        # Summed per bucket's step and task on the device. A row each: a task's NaN is its own.
        shape = (len(finalizer.tokens) * len(finalizer.buckets), len(finalizer.tasks))
        self.losses: Tensor = torch.zeros(shape, dtype=torch.float64, device=finalizer.parallel.device)
        self._balancing = torch.zeros_like(self.losses) if finalizer.coefficients else self.losses
        self.preferences = finalizer.preferences
        self._scales: dict[Unit, list[tuple[MicroBatch, RowScale]]] = {}
        factors = [task.task.spec.training.label_smoothing_factor for task in finalizer.tasks.values()]
        self._smoothing: Tensor | None = None
        if any(factors) and any(stage.last for stage in stages.values()):
            self._smoothing = to_device(torch.tensor(factors), finalizer.parallel.device)
        self._outputs: dict[tuple[int, Unit], list[Tensor]] = {}
        self._interleaved: dict[tuple[int, Unit], InterleavedPasses] = {}
        self._zeros = zeros_for_next_stage(stages, batches.max_rows, self.failed)
        self._lowest = {name: task.load.adapter.lowest_layer for name, task in finalizer.tasks.items()}
        # Weights that are fetched are fetched for all layers above the lowest adapter of any task, in the batch or not;
        # so are rows that expert ranks exchange.
        self._for_all_tasks = any(stage.residence.units or stage.in_step for stage in stages.values())

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        if not action.is_pass:
            return self.finalizer.table_shape(action.bucket)
        backbone, batches = self.stages[action.stage], self.batches[action.unit]
        rows = sum(backbone.hidden_shape(batch)[0] for batch in batches)
        if action.kind == "B" and not any(self._trained_below(backbone.layers.stop, action.unit)):
            rows = 0
        return (rows, *backbone.hidden_shape(batches[0])[1:])

    def needs_gradient(self, action: Action) -> bool:
        """Whether a task of the unit has an adapter in an earlier stage."""
        return any(self._trained_below(self.stages[action.stage].layers.start, action.unit))

    def _trained_below(self, layer: int, unit: Unit) -> list[bool]:
        """For each batch of a unit, whether it needs gradients below a layer."""
        whole = set(self._lowest) if self._for_all_tasks else set()
        return [
            names is not None and any(self._lowest[name] < layer for name in whole or names)
            for names in self.batches.tasks(unit)
        ]

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, or the step's share of the loss on the last stage; zeros once memory has run out."""
        made = self.failed.attempt(action, lambda: self._together(action, hidden))
        if made is not None:
            return made
        self._outputs.pop((action.stage, action.unit), None)
        if self.stages[action.stage].last:
            return self._zeros[0, 0, 0]
        # Memory that is there already: zeros must not run out of it, too.
        return self._zeros[: self.shape(action)[0]] if hidden is None else hidden.detach().zero_()

    def _together(self, action: Action, hidden: Tensor | None) -> Tensor:
        """The batches of a unit, one after the other."""
        backbone, batches = self.stages[action.stage], self.batches[action.unit]
        if len(batches) == 1:
            return self._forward(action, batches[0], hidden)
        needed = self._trained_below(backbone.layers.start, action.unit)
        launch = self.finalizer.bucket(action.bucket).launch
        if launch and all(batch.training for batch in batches):
            passes = InterleavedPasses(backbone, batches, launch[action.stage], self.exchange)
            self._interleaved[action.stage, action.unit] = passes
            made = passes.forward(hidden, needed, self._observer(action, passes))
            outputs = [self._finish(action, batch, own) for batch, own in zip(batches, made, strict=True)]
        else:
            parts: Sequence[Tensor | None] = [None] * len(batches)
            if hidden is not None:
                split = hidden.split([backbone.hidden_shape(batch)[0] for batch in batches])
                parts = [
                    part if trained else part.detach() for part, trained in zip(split, needed, strict=True)
                ]
            outputs = [self._forward(action, batch, part) for batch, part in zip(batches, parts, strict=True)]
        self._outputs[action.stage, action.unit] = outputs
        # Each batch is back-propagated by itself, below.
        with torch.no_grad():
            return torch.stack(outputs).sum() if backbone.last else torch.cat(outputs)

    def _forward(self, action: Action, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        backbone = self.stages[action.stage]
        # Rows of references are computed forward only.
        with activate(batch), torch.set_grad_enabled(batch.training):
            output = backbone.forward(batch, hidden, labelled_only=True)
            return self._finish(action, batch, output)

    def _finish(self, action: Action, batch: MicroBatch, output: Tensor) -> Tensor:
        """What a stage's pass makes: its hidden states, or the loss on the last stage."""
        backbone = self.stages[action.stage]
        if not backbone.last:
            return output
        step = self.finalizer.step(action.bucket)
        scale = RowScale() if self.preferences.couples(step, batch) else None
        with activate(batch):
            smoothing = None if self._smoothing is None else self._smoothing[batch.label_tasks]
            loss, nll = backbone.loss(output, batch, scale, smoothing)
        if scale is not None:
            self.preferences.add(step, batch, nll)
        if batch.training:
            if scale is not None:
                self._scales.setdefault(action.unit, []).append((batch, scale))
            self.losses[action.bucket].index_add_(0, batch.label_tasks, (nll * batch.label_weights).double())
        return loss

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate to the adapters and to the stage's input, unless memory has run out."""
        outputs = self._outputs.pop((action.stage, action.unit), [output])
        scales = self._scales.pop(action.unit, []) if self.stages[action.stage].last else []
        self.failed.attempt(action, lambda: self._back(action, outputs, gradient, scales))
        if action.bucket in self.failed:
            # The gradients so far are of no use.
            for name in self.finalizer.bucket(action.bucket).tasks:
                self.finalizer.tasks[name].optimizer.zero()
        if action.stage == min(self.stages):  # the last on this rank to be back-propagated
            tally = self.batches.forget(action.unit)
            if tally is not None:
                tally.add_losses(self._balancing[action.bucket])

    def _back(
        self,
        action: Action,
        outputs: Sequence[Tensor],
        gradient: Tensor | None,
        scales: Sequence[tuple[MicroBatch, RowScale]],
    ) -> None:
        batches = self.batches[action.unit]
        backbone = self.stages[action.stage]
        for batch, scale in scales:
            self.preferences.set_row_factors(self.finalizer.step(action.bucket), batch, scale)
        trained = self._trained_below(backbone.layers.stop, action.unit)
        gradients: Sequence[Tensor | None] = [None] * len(outputs)
        if gradient is not None and any(trained):
            gradients = [gradient] if len(outputs) == 1 else gradient.split([o.shape[0] for o in outputs])
        passes = self._interleaved.pop((action.stage, action.unit), None)
        if passes is not None:
            own_parts = zip(gradients, trained, strict=True)
            used = [own if is_trained else None for own, is_trained in own_parts]
            passes.backward(outputs, used, self._observer(action, passes))
        for batch, out, own, is_trained in zip(batches, outputs, gradients, trained, strict=True):
            if passes is None and is_trained and out.requires_grad:  # not below all adapters
                with activate(batch):
                    torch.autograd.backward((out,), (own,))
            if batch.carry is not None:
                batch.carry.forget(batch.segments, backbone.layers)

    def _observer(self, action: Action, passes: InterleavedPasses) -> PassTimes | None:
        return None if self.times is None else self.times.of(action, passes.labels)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """Losses and squared gradient norms of the bucket's tasks, summed over this and later stages."""
        losses, figures = self.losses[action.bucket], None
        if others is None and self.preferences.columns(self.finalizer.bucket(action.bucket).tasks):
            names = self.finalizer.bucket(action.bucket).tasks
            figures = self.preferences.finish(self.finalizer.step(action.bucket), names, losses)
        return self.finalizer.norm(action, losses, self._balancing[action.bucket], others, figures)

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Let the bucket's tasks step."""
        if self.copied is not None:
            self.copied.wait()  # on the device, where it has happened long since
        return self.finalizer.update(action.bucket, whole)

    def label(self, action: Action) -> str:
        """Tasks of the bucket."""
        own = self.batches.label(action) if action.is_pass else ""
        return own or self.finalizer.bucket(action.bucket).label
