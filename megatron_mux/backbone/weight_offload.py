"""Where a stage's frozen weights live between uses: in place, divided over data-parallel ranks, in host memory.

A group is a layer, the embedding or the output layer (`weight_group.py`). Its weights are in place only while it is in
use, unless they are resident and not quantised; meanwhile the next group's bytes are fetched.

Autograd would need weights in an order that depends on a rank's rows, and data-parallel ranks, whose rows differ, would
wait for each other. So each layer has a graph of its own, run backward by a function that first fetches the layer's
weights: which weights a pass fetches, and in which order, does not depend on rows. (torch's `fully_shard` leaves that
to hooks on modules and assumes that data-parallel ranks make equal passes.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_mux.backbone.layer import LayersPass
from megatron_mux.backbone.weight_group import SideStream, WeightGroup
from megatron_mux.quantised.matrix import QuantisedMatrix
from megatron_mux.runtime import Parallel

Kind = Literal["resident", "sharded", "offloaded", "sharded-offloaded"]
Key = int | Literal["embedding", "head"]
"""A group of a stage: a layer, by its index in the stage, the embedding or the output layer."""


def weight_group_of(parameter: str, layers: int) -> Key:
    """The group of a parameter of Megatron's `GPTModel`; the final norm belongs to the last layer, if there is one.

    Args:
        parameter: Its full name.
    """
    first, *rest = parameter.split(".")
    if first == "embedding":
        return "embedding"
    if first == "output_layer" or not layers:
        return "head"
    return int(rest[1]) if rest[0] == "layers" else layers - 1


class WeightOffload:
    """Keeps the frozen weights of a stage between uses.

    Args:
        kind: `resident`: on the device, all of them; `sharded`: each data-parallel rank keeps its share of each group;
            `offloaded`: in host memory; `sharded-offloaded`: each data-parallel rank's share in host memory. With one
            data-parallel rank, its share is everything.

    Attributes:
        shares: Number of ranks that keep a share each; 1: each rank keeps everything.
        in_step: Whether data-parallel ranks must make the same passes, because each needs the shares of the others.
        groups: The groups that are fetched or dequantised, and dropped; empty if everything stays in place.
    """

    def __init__(self, kind: Kind, parallel: Parallel) -> None:
        self.parallel = parallel
        self.shares = parallel.dp_size if kind.startswith("sharded") else 1
        self.in_step = self.shares > 1
        self._offloaded = kind.endswith("offloaded")
        self._side = SideStream(parallel.device)
        self._anchor = torch.zeros(0, device=parallel.device, requires_grad=True)
        self.groups: dict[Key, WeightGroup] = {}

    def store(
        self,
        key: Key,
        parameters: Sequence[nn.Parameter],
        quantised: Sequence[tuple[nn.Parameter, QuantisedMatrix]] = (),
    ) -> None:
        """Take over parameters as the group `key`.

        Args:
            parameters: Those that are not quantised, filled.
            quantised: The others, empty, with their matrices.
        """
        if self.shares > 1 or self._offloaded or quantised:
            self.groups[key] = WeightGroup.of(
                parameters, quantised, self.parallel, self.shares, self._offloaded, self._side
            )

    def tie(self, key: Key, other: Key) -> None:
        """Make `key` another name of the group `other`, which has the same weights."""
        if other in self.groups:
            self.groups[key] = self.groups[other]

    @contextmanager
    def using(self, key: Key, following: Key | None = None) -> Iterator[None]:
        """Context in which the weights of a group are in place.

        Args:
            following: The group that is needed next: fetched meanwhile.
        """
        group = self.groups.get(key)
        if group is None:
            yield
            return
        group.wait()
        group.uses += 1
        if following in self.groups:
            self.groups[following].bring()
        try:
            yield
        finally:
            group.uses -= 1
            if not group.uses:
                group.drop()

    def abandon(self) -> None:
        """Drop all weights, fetched or being fetched, after a pass was interrupted."""
        for group in self.groups.values():
            group.abandon()

    def layers(self, hidden: Tensor, trained_from: int) -> LayersPass:
        """Begin a pass through the layers of the stage, whose weights are fetched for it.

        Args:
            hidden: Input of the first layer.
            trained_from: The first layer of the stage with an adapter of any task: equal on all data-parallel ranks.
        """
        return _FetchedLayersPass(self, hidden, trained_from)

    def joined(self, hidden: Tensor, layer: _Layer) -> Tensor:
        """The layer's output, with a backward that fetches its weights even if no row needs a gradient."""
        joined: Tensor = _Join.apply(self._anchor, hidden, layer)  # type: ignore[no-untyped-call]
        return joined


class _FetchedLayersPass(LayersPass):
    """See `WeightOffload.layers`."""

    def __init__(self, offload: WeightOffload, hidden: Tensor, trained_from: int) -> None:
        super().__init__(hidden)
        self._offload = offload
        self._trained_from = trained_from
        self._needed = hidden.requires_grad  # for its value, not only because ranks keep in step

    def through(self, key: int, compute: Callable[[Tensor], Tensor]) -> None:
        """Run the stage's layer `key` by calling `compute` with its weights in place."""
        offload = self._offload
        following: Key = key + 1 if key + 1 in offload.groups else "head"
        trained = torch.is_grad_enabled() and (key >= self._trained_from or self.hidden.requires_grad)
        if not trained:
            with offload.using(key, following):
                self.hidden = compute(self.hidden)
            return
        before = key - 1 if self.hidden.requires_grad and key else None
        own = self.hidden.detach().requires_grad_(self._needed)
        with offload.using(key, following):
            output = compute(own)
        self._needed = output.requires_grad
        self.hidden = offload.joined(self.hidden, _Layer(offload, key, before, own, output))


@dataclass
class _Layer:
    """A layer's own autograd graph, from its forward pass to its backward pass.

    Attributes:
        before: The layer whose backward pass follows, if any.
        own: Its input.
        output: Its output; needs a gradient only if the layer's adapters or the input do.
    """

    offload: WeightOffload
    key: int
    before: int | None
    own: Tensor
    output: Tensor

    def backward(self, gradient: Tensor | None) -> Tensor | None:
        """Back-propagate to the adapters; returns the input's gradient, None for zero."""
        with self.offload.using(self.key, self.before):
            if gradient is not None and self.output.requires_grad:
                torch.autograd.backward((self.output,), (gradient,))
        return self.own.grad


class _Join(torch.autograd.Function):
    """Inserts a layer's graph into the stage's, which thus has a single path through all layers."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, layer: _Layer) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer = layer
        return layer.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        layer, ctx.layer = ctx.layer, None  # frees its graph
        return None, layer.backward(gradient), None
