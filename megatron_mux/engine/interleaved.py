"""Hybrid tasks of one bucket, computed piece by piece in turns, so that each hides the messages of the others.

MuxTune section 3.4.3. The launch order is part of the plan; here it is followed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from megatron_mux.backbone.exchange import Course, Exchange, Observer, interleave
from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.pieces import CollectiveGenerator
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.fusion.graphs.launch_order import LaunchOrder, decode
from megatron_mux.fusion.plan import Plan

Made = TypeVar("Made")


def launch_problem(plan: Plan, stages: Mapping[int, Backbone]) -> str:
    """What is wrong with a plan whose launch orders are for stages with other pieces; empty if nothing.

    Args:
        plan: The plan, the same on every rank.
        stages: This rank's stages.
    """
    for b, bucket in enumerate(plan.buckets):
        for number, stage in stages.items() if bucket.launch else ():
            launch, pieces = bucket.launch[number], stage.pieces
            for name, order, wanted in (
                ("forward", launch.forward, pieces.forward),
                ("backward", launch.backward, pieces.backward),
            ):
                if len(order) != wanted * bucket.batches:
                    return (
                        f"buckets[{b}].launch[{number}].{name}: the plan's launch order has {len(order)} pieces for "
                        f"{bucket.batches} batches, this run's stage {number} has {wanted} for each: sequence "
                        "parallelism, recomputation or expert ranks are not as planned; plan anew"
                    )
    return ""


class InterleavedPasses:
    """A chunk's passes through a stage, one for each of its hybrid tasks.

    Args:
        backbone: The stage.
        batches: A micro-batch for each hybrid task.
        order: Whose piece comes next.
        exchange: Carries the messages of tensor ranks.
    """

    def __init__(
        self, backbone: Backbone, batches: Sequence[PackedBatch], order: LaunchOrder, exchange: Exchange
    ) -> None:
        self._backbone = backbone
        self._batches = batches
        self._order = order
        self._exchange = exchange
        self._hidden: Tensor | None = None
        self._embedded: list[Tensor] = []

    @property
    def labels(self) -> list[str]:
        """The tasks of each batch."""
        return ["+".join(batch.task_rows) for batch in self._batches]

    def forward(
        self, hidden: Tensor | None, needed: Sequence[bool], observer: Observer | None = None
    ) -> list[Tensor]:
        """Compute the layers.

        Args:
            hidden: `[T, 1, H]` of all batches; None on the first stage.
            needed: For each batch, whether an earlier stage needs the gradient of its part.
            observer: See `interleave`.

        Returns:
            For each batch its hidden states, after the final norm on the last stage: without a graph.
        """
        backbone, batches = self._backbone, self._batches
        self._hidden, self._needed = hidden, needed
        self._passes = [
            backbone.begin(batch, own, labelled_only=True) for batch, own in zip(batches, needed, strict=True)
        ]
        if hidden is None:
            parts = [self._embed(batch) for batch in batches]
            self._embedded = parts
        else:
            parts = list(hidden.split([backbone.hidden_shape(batch)[0] for batch in batches]))
        steps = [p.forward(part, own) for p, part, own in zip(self._passes, parts, needed, strict=True)]
        made = self._run(steps, self._order.forward, observer)
        self._made = [output.requires_grad_(is_trained and backbone.last) for output, is_trained in made]
        return self._made

    def backward(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        observer: Observer | None = None,
    ) -> None:
        """Back-propagate to the adapters and to the hidden states received.

        Args:
            outputs: On the last stage each batch's loss, computed from what `forward` returned.
            gradients: On other stages those of what `forward` returned; None for zero.
            observer: See `interleave`.
        """
        if self._backbone.last:
            gradients = [self._of_loss(*own) for own in zip(outputs, self._made, self._batches, strict=True)]
        parts = zip(self._passes, gradients, self._needed, strict=True)
        steps = [p.backward(own, to_input) for p, own, to_input in parts]
        found = self._run(steps, self._order.backward, observer)
        for embedded, own, batch in zip(self._embedded, found, self._batches, strict=False):
            if own is not None and embedded.requires_grad:  # a task trains rows of the embedding
                with activate(batch):
                    torch.autograd.backward((embedded,), (own,))
        if self._hidden is None or not any(self._needed):
            return
        sizes = [self._backbone.hidden_shape(batch)[0] for batch in self._batches]
        whole = zip(self._hidden.detach().split(sizes), found, strict=True)
        self._hidden.grad = torch.cat([torch.zeros_like(h) if own is None else own for h, own in whole])

    @staticmethod
    def _of_loss(loss: Tensor, hidden: Tensor, batch: PackedBatch) -> Tensor | None:
        """The gradient of the hidden states that a loss was computed from."""
        if loss.requires_grad:
            with activate(batch):
                torch.autograd.backward((loss,))
        return hidden.grad

    def _embed(self, batch: PackedBatch) -> Tensor:
        with activate(batch):
            return self._backbone.embed(batch)

    def _run(
        self, steps: Sequence[CollectiveGenerator[Made]], order: str, observer: Observer | None
    ) -> list[Made]:
        courses = [Course(own, batch) for own, batch in zip(steps, self._batches, strict=True)]
        # A chunk may lack the last ones: shorter packs have fewer chunks.
        return interleave(courses, [i for i in decode(order) if i < len(courses)], self._exchange, observer)
