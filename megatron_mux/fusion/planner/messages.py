"""Messages of tensor ranks and expert ranks: how long they take, and what a layer computes between them.

The pieces are those of `backbone.layer_pieces` and `backbone.cut_experts`, in the same order.

Shapes: B batches, S stages; arrays `[2, ...]` hold forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_mux.base_ops import ATTENTION_OPS, EXPERT_OPS, LATENT_OPS, MLP_OPS, SHARED_OPS
from megatron_mux.fusion.graphs.launch_order import LayerCost, PieceCost
from megatron_mux.fusion.planner.backbone_time import BackboneTimeModel
from megatron_mux.fusion.profiler.layer_operators import ORDER, mlp_operators
from megatron_mux.shape import BackboneShape

Array = npt.NDArray[np.float64]

Part = Literal["attention", "mlp", "router", "shared", "experts"]
"""What a layer computes between messages. `router`: all of the half layer that is neither shared nor routed experts."""

PARTS: Mapping[Part, tuple[str, ...]] = {
    "attention": (*ATTENTION_OPS, *LATENT_OPS),
    "mlp": MLP_OPS,
    "router": (),
    "shared": SHARED_OPS,
    "experts": EXPERT_OPS,
}
"""The BaseOps of each part."""

_Steps = Iterator[tuple[float, float | None]]
"""Seconds of computation, and of the message after it; None: there is none."""


@dataclass(frozen=True)
class LayerParallelism:
    """How ranks divide layers.

    Attributes:
        tensor: Whether several ranks share each layer.
        sequence_parallel: Whether they divide the rows between its halves.
        recomputes: Whether layers are computed again in the backward pass.
    """

    tensor: bool = False
    sequence_parallel: bool = False
    exchanges: bool = False
    recomputes: bool = False


class Messages:
    """Messages of passes through stages.

    Args:
        backbone: Seconds of layers without them.

    Attributes:
        any: Whether passes have messages.
    """

    def __init__(self, backbone: BackboneTimeModel, shape: BackboneShape, layout: LayerParallelism) -> None:
        self._backbone, self._layout = backbone, layout
        self._curves = backbone.curves
        self._with_experts = [float(has_experts) for has_experts in backbone.experts]
        self._exchanging = layout.exchanges and any(backbone.experts)
        self.any = layout.tensor or self._exchanging
        self._last_has_experts = shape.has_experts(shape.layers - 1)
        known = [name for experts in backbone.experts for name in mlp_operators(shape, experts)]
        self._parts = {name.removesuffix("_half"): self._curves[name] for name in ("attention_half", *known)}

    def seconds(self, rows: Array, labels: Array, lowest: npt.NDArray[np.int64]) -> Array:
        """`[B, 2, S]` seconds of the messages of passes.

        Args:
            rows, labels: `[B]`.
            lowest: See `BackboneTimeModel.seconds`.
        """
        seconds = np.zeros((len(rows), 2, self._backbone.layers.shape[1]))
        if self._layout.tensor:
            each = self._curves["all_reduce"].many(rows)[0]
            seconds += each[:, None, None] * self._all_reduces(lowest)
        if self._exchanging:
            seconds += self._exchanges(rows, labels, lowest // len(ORDER))
        return seconds

    def _all_reduces(self, lowest: npt.NDArray[np.int64]) -> Array:
        """`[B, 2, S]` sums of hidden states over tensor ranks: one for each half layer that they divide, in either
        pass, but none of a gradient that nothing needs; and those of layers that are recomputed."""
        layer, op = np.divmod(lowest, len(ORDER))
        each = np.array([1.0 if experts else 2.0 for experts in self._backbone.experts])
        above = np.einsum("m,bms->bs", each, self._backbone.from_layer(layer))
        counts = np.empty((len(lowest), 2, above.shape[1]))
        counts[:, 0] = each @ self._backbone.layers
        counts[:, 1] = above * (2 if self._layout.recomputes else 1)
        # What enters the lowest adapter's layer needs no gradient; nor what enters its MLP, if the adapter is there.
        in_mlp = (op == ORDER.index("linear_fc1")) | (op == ORDER.index("linear_fc2"))
        counts[:, 1] -= self._backbone.is_at(layer) * np.where(in_mlp, 2, 1)[:, None]
        return counts

    def _exchanges(self, rows: Array, labels: Array, layer: npt.NDArray[np.int64]) -> Array:
        """`[B, 2, S]` seconds in which rows and gradients go to experts and back."""
        sizes = self._curves["exchange_sizes"].many(rows)[0]
        there, back = self._curves["exchange"].many(rows)
        forward, backward = (sizes + 2 * there)[:, None], (2 * back)[:, None]
        above = np.einsum("m,bms->bs", self._with_experts, self._backbone.from_layer(layer))
        counts = np.empty((len(rows), 2, above.shape[1]))
        counts[:, 0] = forward * (self._with_experts @ self._backbone.layers)
        counts[:, 1] = (backward + forward * self._layout.recomputes) * above
        if self._last_has_experts and not self._layout.sequence_parallel:  # labelled rows only
            trimmed, less = self._curves["exchange"].many(labels)
            counts[:, 0, -1] += 2 * (trimmed - there)
            both = less - back + (trimmed - there) * self._layout.recomputes
            counts[:, 1, -1] += 2 * both * (above[:, -1] > 0)
        return np.maximum(counts, 0.0)

    def layers(
        self, rows: Array, attention: Array, adapters: Array
    ) -> list[tuple[tuple[LayerCost, ...], tuple[LayerCost, ...]]]:
        """For each batch, a layer of each kind in the forward and in the backward pass.

        Args:
            rows: `[B]`.
            attention: `[B, 2]` seconds in one layer.
            adapters: `[B, 2, ops]` seconds of adapters at each BaseOp, of all layers together.
        """
        seconds = {part: curve.many(rows).T for part, curve in self._parts.items()}
        seconds["attention"] = seconds["attention"] + attention
        count = self._backbone.layers.sum(axis=1)  # [M]
        for part, ops in PARTS.items():
            of_all = part == "attention"
            kinds = [m for m, moe in enumerate(self._backbone.experts) if of_all or (part == "mlp") != moe]
            if part in seconds and ops and kinds:
                of_part = adapters[:, :, [ORDER.index(op) for op in ops]].sum(axis=2)
                seconds[part] = seconds[part] + of_part / max(1.0, count[kinds].sum())
        messages = {
            name: self._curves[name].many(rows)
            for name in ("all_reduce", "exchange", "exchange_sizes")
            if name in self._curves
        }
        steps = []
        for b in range(len(rows)):
            step = _LayerSteps(
                self._layout,
                {part: (float(s[b, 0]), float(s[b, 1])) for part, s in seconds.items()},
                {name: (float(s[0, b]), float(s[1, b])) for name, s in messages.items()},
            )
            forward, backward = (
                tuple(step.cost(experts, way) for experts in self._backbone.experts) for way in (False, True)
            )
            steps.append((forward, backward))
        return steps


@dataclass(frozen=True)
class _LayerSteps:
    """What a layer computes and sends, in order.

    Attributes:
        parts, messages: Seconds of each, forward and backward.
    """

    layout: LayerParallelism
    parts: Mapping[str, tuple[float, float]]
    messages: Mapping[str, tuple[float, float]]

    def cost(self, experts: bool, backward: bool) -> LayerCost:
        """The layer in a forward or in a backward pass, with what that computes again."""
        ways = (False, True) if backward and self.layout.recomputes else (backward,)
        pieces, before = [], 0.0
        for compute, message in (step for way in ways for step in self._steps(experts, way)):
            before += compute
            if message is not None:
                pieces.append(PieceCost(before, message))
                before = 0.0
        return LayerCost(tuple(pieces), before)

    def _steps(self, experts: bool, backward: bool) -> _Steps:
        second = self._experts(backward) if experts else self._divided("mlp", backward)
        halves = (self._divided("attention", backward), second)
        return chain(*(reversed(halves) if backward else halves))

    def _divided(self, part: Part, backward: bool) -> _Steps:
        """A half layer that tensor ranks divide, if there are several."""
        seconds = self.parts[part][backward]
        if not self.layout.tensor:
            yield seconds, None
            return
        message = self.messages["all_reduce"][0]
        if self.layout.sequence_parallel:  # rows are gathered before it, and sums scattered behind it
            yield 0.0, message / 2
            message /= 2
        yield seconds, message

    def _experts(self, backward: bool) -> _Steps:
        parts: tuple[Part, ...] = ("router", "shared", "experts")
        router, shared, routed = (self.parts.get(part, (0.0, 0.0))[backward] for part in parts)
        if not self.layout.exchanges:
            yield router + shared + routed, None
            return
        message = self.messages["exchange"][backward]
        if not backward:
            yield router, self.messages["exchange_sizes"][0]
        yield shared, message
        yield routed, message
        if backward:
            yield router, None
