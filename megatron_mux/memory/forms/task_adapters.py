"""The BaseOps that a task's adapter acts on, and its number of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from megatron_mux.adapters.costs import Curve
from megatron_mux.base_ops import BaseOpName
from megatron_mux.shape import BackboneShape, Module
from megatron_mux.tasks import TaskSpec


@dataclass(frozen=True)
class AdaptedOp:
    """A task's adapter at one BaseOp of one layer.

    Attributes:
        curve: Key of its time in a profile; None: it takes no time.
    """

    layer: int
    op: BaseOpName
    curve: Curve | None


class TrainedTensor(NamedTuple):
    """A trained tensor of an adapter.

    Attributes:
        layers: The layers whose stages have it; empty: all layers share it.
        shape: Of the whole tensor.
        dim: The dimension that tensor ranks divide; None: each of them has everything.
    """

    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None

    def share(self, layers: range, of: int) -> float:
        """How much of it a stage with these layers of so many has."""
        return float(any(layer in layers for layer in self.layers)) if self.layers else len(layers) / of

    def size(self, parts: int) -> int:
        """Number of values on one of so many tensor ranks."""
        return -(-math.prod(self.shape) // (1 if self.dim is None else parts))


@dataclass(frozen=True)
class TaskAdapters:
    """A task's adapter, as the time of its steps depends on it.

    Attributes:
        optimizer: Its name in `optimizers.registry`.
        ops: The BaseOps that it acts on.
        layers: Of the backbone.
        sequences: Sequences of one optimizer step, over all ranks.
        length: The most tokens of a sequence.
        virtual_tokens: Virtual tokens in front of each sequence.
        embeds: Whether it trains rows of the embedding, so that gradients go through all layers.
        tensors: The trained tensors one by one.
        together: Sequences of a record, which are in one micro-batch.
    """

    name: str
    optimizer: str
    ops: tuple[AdaptedOp, ...]
    layers: int
    sequences: int
    length: int
    virtual_tokens: int = 0
    embeds: bool = False
    tensors: tuple[TrainedTensor, ...] = ()
    together: int = 1

    @classmethod
    def of(cls, spec: TaskSpec, shape: BackboneShape) -> TaskAdapters:
        """The adapter of a validated task on a backbone.

        Raises:
            UserError: It targets no module of the backbone.
        """
        at: dict[tuple[int, BaseOpName], list[Module]] = {}
        for module in spec.adapter.modules(shape):
            at.setdefault((module.layer, module.op), []).append(module)
        matrices = spec.adapter.own_rows(shape)
        of_tokens = {matrix.key: matrix.layers(shape) for matrix in matrices if matrix.tokens is not None}
        trained = []
        for key, tensor in spec.adapter.tensors(shape).items():
            if tensor.trained:
                layers = of_tokens.get(key, () if tensor.layer is None else (tensor.layer,))
                trained.append(TrainedTensor(layers, tensor.shape, tensor.dim))
        return cls(
            spec.name,
            spec.training.optim,
            tuple(AdaptedOp(layer, op, spec.adapter.curve_of(own)) for (layer, op), own in at.items()),
            shape.layers,
            spec.sequences_per_step,
            spec.data.max_length,
            spec.adapter.virtual_tokens,
            any("embedding" in matrix.places for matrix in matrices),
            tuple(trained),
            spec.training.sequences_per_record,
        )

    @property
    def lowest_layer(self) -> int:
        """The layer in which gradients begin; beyond the last layer if nowhere, -1 if in the embedding."""
        return -1 if self.embeds else min((op.layer for op in self.ops), default=self.layers)

    def values(self, layers: range, tensor: int) -> float:
        """Number of trained values in these layers, on one of `tensor` tensor ranks."""
        return sum(own.size(tensor) * own.share(layers, self.layers) for own in self.tensors)
