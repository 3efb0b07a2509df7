"""Training steps on one rank, in the order of time: forward, backward, sum and norms of gradients, update.

`StepRunner` prepares batches and a template, an order of actions that holds for all stages. `pipeline.execute` goes
through this rank's actions, moves hidden states and gradients between stages, and calls `TrainStep` for each:

    F   forward     a chunk's batches through the backbone with its adapters; on the last stage, their losses
    B   backward    to the adapters, and to the stage's input
    N   norm        once a bucket's passes are done: gradients are summed over ranks, and their norms taken
    U   update      once norms are known over all stages: clip, and step the optimizers

On a single stage that is F B, F B, ... N U. Nothing waits for the device until `BucketFinalizer.finish` reads what the
steps gave. What only some tasks ask for (`step_extension`) is called on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_mux.backbone.exchange import Exchange
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.engine.batches import StepBatches
from megatron_mux.engine.bucket_finalizer import BucketFinalizer
from megatron_mux.engine.interleaved import InterleavedPasses
from megatron_mux.engine.out_of_memory import Stages, zeros_for_next_stage
from megatron_mux.engine.part_times import PartTimes, PassTimes
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.runtime import to_device


class TrainStep:
    """Computes the actions of one or several steps.

    Args:
        stages: This rank's.
        batches: For each chunk, a batch for each hybrid task in it (or half of one).
        finalizer: Of the buckets' steps.
        exchange: Carries messages that other hybrid tasks' computation hides.
        copied: On a GPU, the end of a copy of optimizers' state, which they await before they step.

    Attributes:
        times: Takes the times of pieces and messages; None: nobody wants to know them.
        losses: `[buckets of all steps, tasks]` fp64, summed on the device. A row each: a task's NaN is its own.
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
        burst = self._burst = finalizer.burst
        shape = (len(burst.steps) * len(burst.buckets), len(burst.tasks))
        self.losses: Tensor = torch.zeros(shape, dtype=torch.float64, device=burst.parallel.device)
        factors = [task.task.spec.training.label_smoothing_factor for task in burst.tasks.values()]
        self._smoothing: Tensor | None = None
        if any(factors) and any(stage.last for stage in stages.values()):
            self._smoothing = to_device(torch.tensor(factors), burst.parallel.device)
        self._outputs: dict[tuple[int, ChunkId], list[Tensor]] = {}
        self._interleaved: dict[tuple[int, ChunkId], InterleavedPasses] = {}
        self._zeros = zeros_for_next_stage(stages, batches.max_rows, self.failed)
        self._lowest = {name: task.lowest_layer for name, task in burst.tasks.items()}
        # Weights that are fetched are fetched for all layers above the lowest adapter of any task, in the batch or not;
        # so are rows that expert ranks exchange.
        self._for_all_tasks = any(stage.offload.groups or stage.in_step for stage in stages.values())

    def forward(self, action: Action, hidden: Tensor | None) -> Tensor:
        """Hidden states, or this chunk's share of the step's loss on the last stage; zeros once memory has run out."""
        made = self.failed.attempt(action, lambda: self._forward_chunk(action, hidden))
        if made is not None:
            return made
        self._outputs.pop((action.stage, action.chunk_id), None)
        if self.stages[action.stage].last:
            return self._zeros[0, 0, 0]
        # Memory that is there already: zeros must not run out of it, too.
        return self._zeros[: self.shape(action)[0]] if hidden is None else hidden.detach().zero_()

    def backward(self, action: Action, output: Tensor, gradient: Tensor | None) -> None:
        """Back-propagate to the adapters and to the stage's input, unless memory has run out."""
        outputs = self._outputs.pop((action.stage, action.chunk_id), [output])
        self.failed.attempt(action, lambda: self._backward_chunk(action, outputs, gradient))
        if action.bucket in self.failed:
            # The gradients so far are of no use.
            for name in self._burst.bucket(action.bucket).tasks:
                self._burst.tasks[name].optimizer.zero()
        if action.stage == min(self.stages):  # the last on this rank to be back-propagated
            accumulator = self.batches.forget(action.chunk_id)
            for extension in self.finalizer.extensions:
                extension.after_chunk(action.bucket, accumulator)

    def norm(self, action: Action, others: Tensor | None) -> Tensor:
        """Losses and squared gradient norms of the bucket's tasks, summed over this and later stages."""
        return self.finalizer.norm(action, self.losses[action.bucket], others)

    def update(self, action: Action, whole: Tensor | None) -> Tensor:
        """Let the bucket's tasks step."""
        if self.copied is not None:
            self.copied.wait()  # on the device, where it has happened long since
        return self.finalizer.update(action.bucket, whole)

    # -- what the passes above are made of

    def _forward_chunk(self, action: Action, hidden: Tensor | None) -> Tensor:
        """The batches of a chunk, one after the other."""
        backbone, batches = self.stages[action.stage], self.batches[action.chunk_id]
        if len(batches) == 1:
            return self._forward_batch(action, batches[0], hidden)
        needed = self._trained_below(backbone.layers.start, action.chunk_id)
        launch = self._burst.bucket(action.bucket).launch
        if launch and all(batch.training for batch in batches):
            passes = InterleavedPasses(backbone, batches, launch[action.stage], self.exchange)
            self._interleaved[action.stage, action.chunk_id] = passes
            made = passes.forward(hidden, needed, self._observer(action, passes))
            outputs = [
                self._loss_or_output(action, batch, out) for batch, out in zip(batches, made, strict=True)
            ]
        else:
            parts: Sequence[Tensor | None] = [None] * len(batches)
            if hidden is not None:
                split = hidden.split([backbone.hidden_shape(batch)[0] for batch in batches])
                parts = [
                    part if trained else part.detach() for part, trained in zip(split, needed, strict=True)
                ]
            outputs = [
                self._forward_batch(action, batch, part) for batch, part in zip(batches, parts, strict=True)
            ]
        self._outputs[action.stage, action.chunk_id] = outputs
        # Each batch is back-propagated by itself, below.
        with torch.no_grad():
            return torch.stack(outputs).sum() if backbone.last else torch.cat(outputs)

    def _forward_batch(self, action: Action, batch: PackedBatch, hidden: Tensor | None) -> Tensor:
        backbone = self.stages[action.stage]
        # Rows of references are computed forward only.
        with activate(batch), torch.set_grad_enabled(batch.training):
            output = backbone.forward(batch, hidden, labelled_only=True)
            return self._loss_or_output(action, batch, output)

    def _loss_or_output(self, action: Action, batch: PackedBatch, output: Tensor) -> Tensor:
        """What a stage's pass makes: its hidden states, or the loss on the last stage."""
        backbone, extensions = self.stages[action.stage], self.finalizer.extensions
        if not backbone.last:
            return output
        for extension in extensions:
            extension.before_loss(action.bucket, batch)
        with activate(batch):
            smoothing = None if self._smoothing is None else self._smoothing[batch.label_tasks]
            loss, nll = backbone.loss(output, batch, batch.row_scale, smoothing)
        for extension in extensions:
            extension.after_loss(action.bucket, batch, nll)
        if batch.training:
            self.losses[action.bucket].index_add_(0, batch.label_tasks, (nll * batch.label_weights).double())
        return loss

    def _backward_chunk(self, action: Action, outputs: Sequence[Tensor], gradient: Tensor | None) -> None:
        """Back-propagate through the batches of a chunk, one after the other or in turns."""
        batches = self.batches[action.chunk_id]
        backbone = self.stages[action.stage]
        for extension in self.finalizer.extensions if backbone.last else ():
            for batch in batches:
                extension.before_backward(action.bucket, batch)
        trained = self._trained_below(backbone.layers.stop, action.chunk_id)
        gradients: Sequence[Tensor | None] = [None] * len(outputs)
        if gradient is not None and any(trained):
            gradients = [gradient] if len(outputs) == 1 else gradient.split([o.shape[0] for o in outputs])
        passes = self._interleaved.pop((action.stage, action.chunk_id), None)
        if passes is not None:
            own_parts = zip(gradients, trained, strict=True)
            used = [gradient if is_trained else None for gradient, is_trained in own_parts]
            passes.backward(outputs, used, self._observer(action, passes))
        for batch, out, grad, is_trained in zip(batches, outputs, gradients, trained, strict=True):
            if passes is None and is_trained and out.requires_grad:  # not below all adapters
                with activate(batch):
                    torch.autograd.backward((out,), (grad,))
            if batch.carry is not None:
                batch.carry.forget(batch.segments, backbone.layers)

    def _observer(self, action: Action, passes: InterleavedPasses) -> PassTimes | None:
        return None if self.times is None else self.times.of(action, passes.labels)

    # -- what `execute` asks

    def shape(self, action: Action) -> tuple[int, ...]:
        """Shape of what travels between stages."""
        if not action.is_pass:
            return self.finalizer.stats_shape(action.bucket)
        backbone, batches = self.stages[action.stage], self.batches[action.chunk_id]
        rows = sum(backbone.hidden_shape(batch)[0] for batch in batches)
        if action.kind == "B" and not any(self._trained_below(backbone.layers.stop, action.chunk_id)):
            rows = 0
        return (rows, *backbone.hidden_shape(batches[0])[1:])

    def needs_gradient(self, action: Action) -> bool:
        """Whether a task of the chunk has an adapter in an earlier stage."""
        return any(self._trained_below(self.stages[action.stage].layers.start, action.chunk_id))

    def _trained_below(self, layer: int, chunk_id: ChunkId) -> list[bool]:
        """For each batch of a chunk, whether it needs gradients below a layer."""
        whole = set(self._lowest) if self._for_all_tasks else set()
        return [
            names is not None and any(self._lowest[name] < layer for name in whole or names)
            for names in self.batches.tasks(chunk_id)
        ]

    def label(self, action: Action) -> str:
        """Tasks of the bucket."""
        label = self.batches.label(action) if action.is_pass else ""
        return label or self._burst.bucket(action.bucket).label
