"""A model's widths and parameters, as the memory of its ranks depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_mux.base_ops import ATTENTION_OPS, BASE_OPS, COLUMN_PARALLEL, EXPERT_OPS, BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.expert_shape import Experts, Placement
from megatron_mux.memory.optimizers import Shapes
from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class Unit:
    """Parameters that are used together: a layer, the embedding, the output layer.

    Attributes:
        divided: Values that tensor ranks divide among themselves.
        copied: Values that each tensor rank has: norms, biases behind a sum, positions. In a rank's share
            (`stages.on_rank`): all values but those of experts.
        experts: Values of all experts, which tensor ranks divide and expert ranks share out.
        shapes: Shapes of the undivided tensors; empty where only adapters are trained.
    """

    divided: int = 0
    copied: int = 0
    experts: int = 0
    shapes: Shapes = field(default=Shapes(), compare=False)

    def __add__(self, other: Unit) -> Unit:
        return Unit(
            self.divided + other.divided,
            self.copied + other.copied,
            self.experts + other.experts,
            self.shapes + other.shapes,
        )

    @property
    def total(self) -> int:
        """All values."""
        return self.divided + self.copied + self.experts


@dataclass(frozen=True)
class Architecture:
    """A model's sizes and units.

    Attributes:
        model_type: As in the config.
        hidden, heads, kv_heads, head_dim: Sizes of hidden states and of attention.
        ffn: Inner width of the MLP; of one expert where there are several, unless `moe` is set.
        gated: Whether the MLP multiplies an activated half with a plain half.
        experts: How many experts a layer has; 1: a plain MLP.
        experts_per_token: How many of them compute a token.
        vocabulary: Tokens.
        tied: Whether the output layer is the token embedding.
        layers: The layers' units, in order.
        embedding: Parameters before the layers.
        head: The output layer's own parameters; none of its weights if tied.
        final: Parameters behind the layers besides the output layer's.
        activation: Hugging Face's name of the MLP's activation function. This field and the following ones are set for
            backbones only.
        rms_norm: Whether norms are RMS norms.
        rotary: Whether queries and keys are rotated.
        qk_norm: Whether queries and keys are normalised head by head.
        output_norms: Whether the outputs of attention and of the MLP are normalised before they are added.
        rotations: How many different rotary embeddings its layers have.
        moe: Its experts, if any.
        placement: Which expert ranks hold which of them; None: neighbouring ones share a rank.
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
    layers: tuple[Unit, ...]
    embedding: Unit
    head: Unit
    final: Unit
    activation: str = ""
    rms_norm: bool = False
    rotary: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    rotations: int = 1
    moe: Experts | None = None
    placement: Placement | None = field(default=None, compare=False)

    @property
    def total(self) -> int:
        """Values of all parameters."""
        return sum((*self.layers, self.embedding, self.head, self.final), start=Unit()).total

    @property
    def queries(self) -> int:
        """Width of all queries, and of attention's output."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.kv_heads * self.head_dim

    @property
    def inner(self) -> int:
        """Output width of the MLP's first product."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def widths(self) -> Mapping[BaseOpName, tuple[int, int]]:
        """Input and output width of every BaseOp."""
        return {
            "linear_qkv": (self.hidden, self.queries + 2 * self.keys),
            "linear_proj": (self.queries, self.hidden),
            "linear_fc1": (self.hidden, self.inner),
            "linear_fc2": (self.ffn, self.hidden),
            "experts_fc1": (self.hidden, self.expert_ffn * (2 if self.gated else 1)),
            "experts_fc2": (self.expert_ffn, self.hidden),
        }

    @property
    def expert_ffn(self) -> int:
        """Inner width of an expert; 0 without experts."""
        return 0 if self.moe is None else self.moe.ffn

    @property
    def moe_share(self) -> float:
        """The share of layers that have experts instead of an MLP."""
        return 0.0 if self.moe is None else 1 - len(self.moe.dense) / len(self.layers)

    def most_held(self, ranks: int) -> int:
        """The most experts that one of so many expert ranks holds, of all layers."""
        if self.placement is None:
            return -(-self.experts // ranks)
        held = self.placement.held
        return max(len(held(layer, rank)) for layer in self.placement.ranks for rank in range(ranks))


def architecture_of(shape: BackboneShape, placement: Placement | None = None) -> Architecture:
    """The architecture of a backbone, without a model of `transformers`; its own dropout is off.

    Args:
        shape: The backbone's.
        placement: Which expert ranks hold which experts; None: neighbouring ones share a rank.

    Raises:
        UserError: The backbone has shared experts or latent attention.
    """
    shape.refuse_latent("The closed form of the engine's memory")
    moe = shape.experts
    if moe is not None and moe.shared_ffn:
        raise UserError(
            f"The closed form of the engine's memory does not know shared experts, which a {shape.family} has."
        )
    vocabulary = shape.vocab * shape.hidden
    positions = 0 if shape.position_limit is None else shape.position_limit + shape.position_offset
    units = {has: _layer(shape, has) for has in (False, True)}
    return Architecture(
        model_type=shape.family,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn=shape.ffn,
        gated=shape.gated,
        activation=shape.activation,
        rms_norm=shape.norm == "RMSNorm",
        rotary=any(shape.ropes),
        experts=1 if moe is None else moe.count,
        experts_per_token=1 if moe is None else moe.routing.top_k,
        vocabulary=shape.vocab,
        tied=shape.tied,
        layers=tuple(units[shape.has_experts(layer)] for layer in range(shape.layers)),
        embedding=Unit(divided=vocabulary, copied=positions * shape.hidden),
        head=Unit(divided=0 if shape.tied else vocabulary),
        final=Unit(copied=shape.hidden * len(shape.norm_leaves)),
        qk_norm=shape.qk_norm,
        output_norms=shape.output_norms,
        rotations=len({rope for rope in shape.ropes if rope is not None}),
        moe=moe,
        placement=placement,
    )


def _layer(shape: BackboneShape, has_experts: bool) -> Unit:
    """A layer with experts, or with an MLP."""
    names = shape.names
    divided, copied = 0, len(names.layer_norms) * shape.hidden * len(shape.norm_leaves)
    copied += len(names.head_norms) * shape.head_dim
    for op in ATTENTION_OPS if has_experts else BASE_OPS:
        divided += shape.in_features(op) * shape.out_features(op)
        if shape.biases[op]:
            bias = shape.out_features(op)
            divided, copied = (divided + bias, copied) if op in COLUMN_PARALLEL else (divided, copied + bias)
    if not has_experts or shape.experts is None:
        return Unit(divided, copied)
    router = shape.experts.count * (shape.hidden + shape.experts.routing.bias)
    one = sum(shape.in_features(op) * shape.out_features(op) for op in EXPERT_OPS)
    return Unit(divided, copied + router, experts=shape.experts.count * one)
