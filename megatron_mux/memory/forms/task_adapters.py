"""The BaseOps that a task's adapter acts on, the memory it keeps there and its number of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_mux.adapters.costs import Curve, Kept, Place
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.base_ops import COLUMN_PARALLEL, EXPERT_OPS, LATENT_OPS, MLP_OPS, SHARED_OPS, BaseOpName
from megatron_mux.memory.forms.beginnings import FIRSTS, First
from megatron_mux.optimizers.registry import OPTIMIZERS
from megatron_mux.shape import BackboneShape, Module
from megatron_mux.tasks import TaskSpec


@dataclass(frozen=True)
class AdaptedOp:
    """A task's adapter at one BaseOp of one layer.

    Attributes:
        layer: Index of the layer.
        op: The BaseOp.
        curve: Key of its time in a profile; None: it takes no time.
        kept: The memory it keeps there.
    """

    layer: int
    op: BaseOpName
    curve: Curve | None
    kept: Kept = Kept()  # noqa: RUF009  (frozen)

    @property
    def first(self) -> First:
        """Where gradients begin: at its BaseOp, or behind it for a prefix, which takes no time at its BaseOp."""
        if self.op == "linear_qkv" and self.curve is None:
            return "core_attention"
        if self.op in LATENT_OPS:
            return "linear_kv_up" if self.op in ("linear_q_up", "linear_kv_up") else "linear_qkv"
        # Experts are where other layers have their MLP.
        return MLP_OPS[self.op not in COLUMN_PARALLEL] if self.op in (*SHARED_OPS, *EXPERT_OPS) else self.op


def adapted_ops(adapter: AdapterSpec, shape: BackboneShape) -> tuple[AdaptedOp, ...]:
    """Where an adapter acts, by layer.

    Args:
        adapter: The `adapter` section of a task.
        shape: Shape of the backbone.
    """
    at: dict[tuple[int, BaseOpName], list[Module]] = {}
    for module in adapter.modules(shape):
        at.setdefault((module.layer, module.op), []).append(module)
    found: list[AdaptedOp] = []
    for (layer, op), own in at.items():
        several = len(shape.names.ops[op]) > 1
        share = sum(module.out_features for module in own) if several else 0
        place = Place(op, shape.in_features(op), shape.out_features(op), len(own), share)
        found.append(AdaptedOp(layer, op, adapter.curve_of(own), adapter.kept(place, own, shape)))
    return tuple(found)


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
    """A task's adapter, as memory depends on it.

    Attributes:
        name: The task's name.
        optimizer: Its name in `optimizers.registry`.
        ops: The BaseOps that it acts on.
        divided: `[L]` trained values of each layer that tensor ranks divide.
        copied: `[L]` trained values of each layer that every tensor rank has.
        sequences: Sequences of one optimizer step, over all ranks.
        length: The most tokens of a sequence.
        virtual_tokens: Virtual tokens in front of each sequence.
        fixed: Untrained values on each rank with a part of the adapter.
        fixed_divided, fixed_copied: `[L]` untrained values of each layer, like `divided` and `copied`.
        embeds: Whether it trains rows of the embedding, so that gradients go through all layers.
        tensors: The trained tensors one by one, for optimizers whose states depend on shapes.
        tokens: Those of them that are rows of single tokens: the only ones that neither `divided` nor `copied` counts.
        copies: How often adapter and gradients are held: twice with a frozen copy for reference.
        refers: Whether its rows are computed a second time, forward only, with its reference.
    """

    name: str
    optimizer: str
    ops: tuple[AdaptedOp, ...]
    divided: tuple[float, ...]
    copied: tuple[float, ...]
    sequences: int
    length: int
    virtual_tokens: int = 0
    fixed: float = 0.0
    fixed_divided: tuple[float, ...] = ()
    fixed_copied: tuple[float, ...] = ()
    embeds: bool = False
    tensors: tuple[TrainedTensor, ...] = ()
    tokens: tuple[TrainedTensor, ...] = ()
    copies: int = 1
    refers: bool = False

    @classmethod
    def of(cls, spec: TaskSpec, shape: BackboneShape) -> TaskAdapters:
        """The adapter of a validated task on a backbone.

        Raises:
            UserError: It targets no module of the backbone.
        """
        divided, copied, fixed_divided, fixed_copied = ([0.0] * shape.layers for _ in range(4))
        fixed = 0.0
        trained: list[TrainedTensor] = []
        tokens: list[TrainedTensor] = []
        matrices = spec.adapter.own_rows(shape)
        of_tokens = {matrix.key: matrix.layers(shape) for matrix in matrices if matrix.tokens is not None}
        for key, tensor in spec.adapter.tensors(shape).items():
            size = math.prod(tensor.shape)
            if tensor.trained:
                layers = of_tokens.get(key, () if tensor.layer is None else (tensor.layer,))
                trained.append(TrainedTensor(layers, tensor.shape, tensor.dim))
            if key in of_tokens:
                tokens.append(trained[-1])
                continue
            if tensor.layer is not None:
                per_layer = (divided, copied) if tensor.trained else (fixed_divided, fixed_copied)
                per_layer[tensor.dim is None][tensor.layer] += size
            elif tensor.trained:
                copied = [values + size / shape.layers for values in copied]
            else:
                fixed += size
        ops = adapted_ops(spec.adapter, shape)
        return cls(
            spec.name,
            spec.training.optim,
            ops,
            tuple(divided),
            tuple(copied),
            spec.sequences_per_step,
            spec.data.max_length,
            spec.adapter.virtual_tokens,
            fixed,
            tuple(fixed_divided),
            tuple(fixed_copied),
            any("embedding" in matrix.places for matrix in matrices),
            tuple(trained),
            tuple(tokens),
            2 if spec.starts_from_reference else 1,
            spec.training.refers_in_steps,
        )

    @property
    def lowest(self) -> int:
        """Where gradients begin, as layer * len(FIRSTS) + index in `FIRSTS`; beyond the last layer if nowhere, in layer
        -1 if in the embedding."""
        count = len(FIRSTS)
        if self.embeds:
            return -count
        places = (op.layer * count + FIRSTS.index(op.first) for op in self.ops)
        return min(places, default=len(self.divided) * count)

    @cached_property
    def lowest_layer(self) -> int:
        """The layer in which gradients begin; beyond the last layer if nowhere, -1 if in the embedding."""
        return self.lowest // len(FIRSTS)

    def values(self, layers: range, tensor: int) -> float:
        """Number of trained values in these layers, on one of `tensor` tensor ranks."""
        of_tokens = sum(own.size(tensor) * own.share(layers, len(self.divided)) for own in self.tokens)
        return of_tokens + sum(self.divided[i] / tensor + self.copied[i] for i in layers)

    def states(self, layers: range, tensor: int) -> float:
        """fp32 values of optimizer state for these layers, on one of `tensor` tensor ranks."""
        kind = OPTIMIZERS[self.optimizer]
        if kind.states_per_value is not None:
            return kind.states_per_value * self.values(layers, tensor)
        total = 0.0
        for own in self.tensors:
            if share := own.share(layers, len(self.divided)):
                total += share * kind.state_bytes(own.shape, own.dim, tensor) / 4
        return total

    def scratch(self, layers: range, tensor: int) -> float:
        """fp32 values of buffers that the optimizer keeps to step the tensors of these layers."""
        kind = OPTIMIZERS[self.optimizer]
        if not kind.scratch_bytes([1]):
            return 0.0
        own = [t.size(tensor) for t in self.tensors if t.share(layers, len(self.divided))]
        return kind.scratch_bytes(own) / 4

    def fixed_values(self, layers: range, tensor: int) -> float:
        """Number of untrained values on one of `tensor` tensor ranks with these layers."""
        shared = self.fixed if any(op.layer in layers for op in self.ops) else 0.0
        divided = sum(self.fixed_divided[layers.start : layers.stop])
        return shared + divided / tensor + sum(self.fixed_copied[layers.start : layers.stop])
