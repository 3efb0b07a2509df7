"""A model's widths and parameters, as the memory of its ranks depends on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_mux.base_ops import (
    COLUMN_PARALLEL,
    EXPERT_OPS,
    REPLICATED,
    BaseOpName,
)
from megatron_mux.expert_shape import Experts, Placement
from megatron_mux.memory.assumed_routes import Access
from megatron_mux.memory.optimizers import Shapes
from megatron_mux.quantised.scheme import Quantisation
from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class ParamCounts:
    """Numbers of values of parameters that are used together: a layer, the embedding, the output layer.

    Attributes:
        divided: Values that tensor ranks divide among themselves.
        copied: Values that each tensor rank has: norms, biases behind a sum, positions. In a rank's share
            (`stages.on_rank`): all values but those of experts.
        experts: Values of all experts, which tensor ranks divide and expert ranks share out.
        shapes: Shapes of the undivided tensors; empty where only adapters are trained.
        quantised: Those of its values that are held quantised; None: none of them.
        held: Bytes that they are held in.
    """

    divided: int = 0
    copied: int = 0
    experts: int = 0
    shapes: Shapes = field(default=Shapes(), compare=False)
    quantised: ParamCounts | None = None
    held: ParamCounts | None = None

    def __add__(self, other: ParamCounts) -> ParamCounts:
        return ParamCounts(
            self.divided + other.divided,
            self.copied + other.copied,
            self.experts + other.experts,
            self.shapes + other.shapes,
            _sum(self.quantised, other.quantised),
            _sum(self.held, other.held),
        )

    def bytes(self, size: int) -> ParamCounts:
        """Bytes between uses.

        Args:
            size: Of a value that is not quantised.
        """
        quantised, held = self.quantised or ParamCounts(), self.held or ParamCounts()
        return ParamCounts(
            size * (self.divided - quantised.divided) + held.divided,
            size * (self.copied - quantised.copied) + held.copied,
            size * (self.experts - quantised.experts) + held.experts,
        )

    @property
    def dequantised(self) -> int:
        """Values that are dequantised for use."""
        return 0 if self.quantised is None else self.quantised.total

    @property
    def total(self) -> int:
        """All values."""
        return self.divided + self.copied + self.experts


def _sum(one: ParamCounts | None, other: ParamCounts | None) -> ParamCounts | None:
    return other if one is None else one if other is None else one + other


@dataclass(frozen=True)
class Architecture:
    """A model's sizes, and the parameters of its layers and ends.

    Attributes:
        hidden, heads, kv_heads, head_dim: Sizes of hidden states and of attention.
        ffn: Inner width of the MLP; of one expert where there are several, unless `moe` is set.
        gated: Whether the MLP multiplies an activated half with a plain half.
        experts: How many experts a layer has; 1: a plain MLP.
        experts_per_token: How many of them compute a token.
        tied: Whether the output layer is the token embedding.
        layers: Those of the layers, in order.
        embedding: Parameters before the layers.
        head: The output layer's own parameters; none of its weights if tied.
        final: Parameters behind the layers besides the output layer's.
        rotary: Whether queries and keys are rotated. This field and the following ones are set for backbones only.
        moe: Its experts, if any.
        placement: Which expert ranks hold which of them; None: neighbouring ones share a rank.
        access: How likely rows select each of them; None: all equally.
        quantisation: How weights of linear modules are held, if not in the backbone's dtype.
    """

    model_type: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    experts: int
    experts_per_token: int
    vocabulary: int
    tied: bool
    layers: tuple[ParamCounts, ...]
    embedding: ParamCounts
    head: ParamCounts
    final: ParamCounts
    rotary: bool = False
    moe: Experts | None = None
    placement: Placement | None = field(default=None, compare=False)
    access: Access | None = field(default=None, compare=False)
    quantisation: Quantisation | None = None

    @property
    def total(self) -> int:
        """Values of all parameters."""
        return sum((*self.layers, self.embedding, self.head, self.final), start=ParamCounts()).total

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def inner(self) -> int:
        """Output width of the MLP's first product."""
        return self.ffn * (2 if self.gated else 1)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of an MLP."""
        return self.moe is not None and layer not in self.moe.dense

    def held(self, layer: int, ranks: int) -> int:
        """The experts of a layer on that one of so many expert ranks which holds most there."""
        if self.placement is None or not self.has_experts(layer):
            return -(-self.experts // ranks)
        return max(len(self.placement.held(layer, rank)) for rank in range(ranks))


def architecture_of(
    shape: BackboneShape, placement: Placement | None = None, access: Access | None = None
) -> Architecture:
    """The architecture of a backbone, without a model of `transformers`; its own dropout is off."""
    moe = shape.experts
    vocabulary = shape.vocab * shape.hidden
    positions = 0 if shape.position_limit is None else shape.position_limit + shape.position_offset
    return Architecture(
        model_type=shape.family,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        gated=shape.gated,
        rotary=any(shape.ropes),
        experts=1 if moe is None else moe.count,
        experts_per_token=1 if moe is None else moe.routing.top_k,
        vocabulary=shape.vocab,
        tied=shape.tied,
        layers=tuple(_layer(shape, layer) for layer in range(shape.layers)),
        embedding=ParamCounts(divided=vocabulary, copied=positions * shape.hidden),
        head=ParamCounts(divided=0 if shape.tied else vocabulary),
        final=ParamCounts(copied=shape.hidden * len(shape.norm_leaves)),
        moe=moe,
        placement=placement,
        access=access,
        quantisation=shape.quantisation,
    )


def _layer(shape: BackboneShape, layer: int) -> ParamCounts:
    names = shape.names
    divided, copied = 0, len(names.layer_norms) * shape.hidden * len(shape.norm_leaves)
    copied += sum(width for _, width in shape.inner_norms.values())
    for op in (op for op in shape.ops(layer) if op not in EXPERT_OPS):
        weight, bias = (
            shape.in_features(op) * shape.out_features(op),
            shape.out_features(op) * shape.biases[op],
        )
        if op in REPLICATED:
            copied += weight + bias
        else:
            divided += weight + bias * (op in COLUMN_PARALLEL)
            copied += bias * (op not in COLUMN_PARALLEL)
    part = ParamCounts(divided, copied) + _quantised(shape, layer)
    if not shape.has_experts(layer):
        return part
    assert shape.experts is not None
    router = shape.experts.count * (shape.hidden + shape.experts.routing.bias)
    one = sum(shape.in_features(op) * shape.out_features(op) for op in EXPERT_OPS)
    return part + ParamCounts(copied=router, experts=shape.experts.count * one)


def _quantised(shape: BackboneShape, layer: int) -> ParamCounts:
    """Which values of a layer are quantised, and the bytes that they are held in: a matrix for each BaseOp."""
    quantisation, values, held = shape.quantisation, ParamCounts(), ParamCounts()
    if quantisation is None:
        return ParamCounts()
    for op in shape.ops(layer):
        modules = [module for module in shape.modules if module.layer == layer and module.op == op]
        if not all(quantisation.covers(module.path, module.experts) for module in modules):
            continue
        copies = shape.experts.count if op in EXPERT_OPS and shape.experts is not None else 1
        sources = [(module.out_features, module.in_features) for module in modules]
        rows, columns = copies * shape.out_features(op), shape.in_features(op)
        total = quantisation.nbytes(rows, columns, sources * copies)
        everywhere = 0
        if op not in EXPERT_OPS and op not in REPLICATED:
            everywhere = quantisation.undivided_nbytes(rows, sources, op not in COLUMN_PARALLEL)
        values += _of_op(op, rows * columns)
        held += _of_op(op, total - everywhere) + ParamCounts(copied=everywhere)
    return ParamCounts(quantised=values, held=held)


def _of_op(op: BaseOpName, count: int) -> ParamCounts:
    """So many values or bytes of a BaseOp, divided as it is."""
    if op in EXPERT_OPS:
        return ParamCounts(experts=count)
    return ParamCounts(copied=count) if op in REPLICATED else ParamCounts(divided=count)
