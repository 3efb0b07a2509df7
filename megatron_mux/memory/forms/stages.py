"""A rank's share of a model's parameters, by pipeline stage, tensor rank and expert rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.memory.forms.architecture import Architecture, ParamCounts
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.optimizers import Shapes
from megatron_mux.quantised.matrix import VALUES_AT_ONCE

_INDEX = 2
"""Temporary bytes of a value that is dequantised on a CPU, at most: of what looks its code up."""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage as one of its ranks has it.

    Attributes:
        layers: Global indices of its layers.
        counts: Its parameters in the order of the forward pass: the embedding, the layers, the output layer; the rank's
            share before data-parallel ranks shard them.
    """

    index: int
    count: int
    layers: range
    counts: tuple[ParamCounts, ...]

    @property
    def first(self) -> bool:
        """Whether it embeds tokens."""
        return not self.index

    @property
    def last(self) -> bool:
        """Whether it computes the loss."""
        return self.index == self.count - 1

    @property
    def values(self) -> int:
        """Number of values."""
        return sum(part.total for part in self.counts)

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of all tensors."""
        return sum((part.shapes for part in self.counts), start=Shapes())

    @property
    def largest(self) -> int:
        """Number of values of its largest part."""
        return max(part.total for part in self.counts)

    @property
    def two_in_use(self) -> int:
        """Number of values of the two largest neighbours: one is used while the next is being fetched."""
        sizes = [part.total for part in self.counts]
        return max(a + b for a, b in pairwise(sizes)) if len(sizes) > 1 else sizes[0]

    def in_use(self, size: int, on_gpu: bool) -> int:
        """Most bytes that weights take in use which are kept elsewhere between uses.

        Args:
            size: Of a value in use.
            on_gpu: Whether they are dequantised by a kernel, which needs no other memory.
        """
        dequantised = size * max(part.dequantised for part in self.counts)
        if dequantised and not on_gpu:
            dequantised += min(VALUES_AT_ONCE, dequantised // size) * (_INDEX + 4 * (size != 4))
        return dequantised + replace(self, counts=tuple(part.bytes(size) for part in self.counts)).two_in_use

    def divided(self, method: ParallelConfig) -> int:
        """Number of values of each data-parallel rank's shard."""
        dense = sum(-(-part.copied // method.data) for part in self.counts)
        return dense + sum(-(-part.experts * method.expert // method.data) for part in self.counts)


def stages(architecture: Architecture, method: ParallelConfig) -> list[Stage]:
    """The stages of a method, with layers divided as evenly as possible."""
    split = stage_layers(even_split(len(architecture.layers), method.pipeline))
    found, last = [], len(split) - 1
    for index, layers in enumerate(split):
        counts = [on_rank(architecture.embedding, method)] if not index else []
        counts += [
            on_rank(
                architecture.layers[i],
                method,
                architecture.held(i, method.expert) / architecture.experts,
            )
            for i in layers
        ]
        if index == last:
            head = architecture.head + architecture.final
            if architecture.tied and index:  # a copy of its own
                head += ParamCounts(divided=architecture.embedding.divided)
            counts.append(on_rank(head, method))
        found.append(Stage(index, len(split), layers, tuple(counts)))
    return found


def on_rank(part: ParamCounts, method: ParallelConfig, held_experts: float = 1.0) -> ParamCounts:
    """A rank's share: `copied` is replicated over data-parallel ranks, `experts` over those with the same experts.

    Args:
        held_experts: The share of the experts that the rank holds, or divides with other tensor ranks.
    """
    dense = -(-part.divided // method.tensor) + part.copied
    experts = -(-round(part.experts * held_experts) // method.tensor)
    quantised, held = (
        None if own is None else on_rank(own, method, held_experts) for own in (part.quantised, part.held)
    )
    return ParamCounts(copied=dense, experts=experts, shapes=part.shapes, quantised=quantised, held=held)
