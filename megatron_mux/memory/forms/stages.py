"""The part of a model's parameters that a rank has: by pipeline stage, tensor rank and expert rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.memory.forms.architecture import Architecture, Unit
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.optimizers import Shapes


@dataclass(frozen=True)
class Share:
    """Values of a unit that a rank has before data-parallel ranks divide them.

    Attributes:
        dense: What all data-parallel ranks have alike.
        experts: What only those with the same experts have alike.
        shapes: Of the unit's tensors as if nothing divided them.
    """

    dense: int
    experts: int
    shapes: Shapes = Shapes()  # noqa: RUF009  (frozen)

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Stage:
    """A pipeline stage as one of its ranks has it.

    Attributes:
        index, count: Which one, of how many.
        layers: Global indices of its layers.
        units: What is used together, in the order of the forward pass: the embedding, the layers, the output layer.
    """

    index: int
    count: int
    layers: range
    units: tuple[Share, ...]

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
        """All values."""
        return sum(unit.total for unit in self.units)

    @cached_property
    def shapes(self) -> Shapes:
        """Of all tensors."""
        return sum((unit.shapes for unit in self.units), start=Shapes())

    @property
    def largest(self) -> int:
        """Values of the largest unit."""
        return max(unit.total for unit in self.units)

    @property
    def two_in_use(self) -> int:
        """Values of the two largest neighbours: one is used while the next is on its way."""
        sizes = [unit.total for unit in self.units]
        return max(a + b for a, b in pairwise(sizes)) if len(sizes) > 1 else sizes[0]

    def divided(self, method: Method) -> int:
        """Values of each data-parallel rank's share."""
        dense = sum(-(-unit.dense // method.data) for unit in self.units)
        return dense + sum(-(-unit.experts * method.expert // method.data) for unit in self.units)


def stages(architecture: Architecture, method: Method) -> list[Stage]:
    """The stages of a method; layers as even as can be."""
    return stages_of(
        architecture, method, stage_layers(even_split(len(architecture.layers), method.pipeline))
    )


def stages_of(architecture: Architecture, method: Method, split: Sequence[range]) -> list[Stage]:
    """The stages that have these layers each; the method's own number of stages is not looked at."""
    return [
        Stage(index, len(split), layers, tuple(_units(architecture, method, index, layers, len(split))))
        for index, layers in enumerate(split)
    ]


def _units(
    architecture: Architecture, method: Method, index: int, layers: range, count: int
) -> Sequence[Share]:
    first, last = not index, index == count - 1
    units = [_share(architecture.embedding, method)] if first else []
    units += [_share(architecture.layers[i], method) for i in layers]
    if last:
        head = architecture.head + architecture.final
        if architecture.tied and not first:  # a copy of its own
            head += Unit(divided=architecture.embedding.divided)
        units.append(_share(head, method))
    return units


def _share(unit: Unit, method: Method) -> Share:
    dense = -(-unit.divided // method.tensor) + unit.copied
    return Share(dense, -(-unit.experts // (method.tensor * method.expert)), unit.shapes)
