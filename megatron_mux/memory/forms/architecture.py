"""A model's widths and parameters, as the memory of its ranks depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_mux.base_ops import BASE_OPS, COLUMN_PARALLEL, BaseOpName
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
        ffn: Inner width of the MLP, of one expert where there are several.
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
        }


def architecture_of(shape: BackboneShape) -> Architecture:
    """The architecture of a backbone, without a model of `transformers`; its own dropout is off.

    Raises:
        UserError: The backbone has experts.
    """
    shape.refuse_latent("The closed form of the engine's memory")
    shape.refuse_experts("The closed form of the engine's memory")
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
        activation=shape.activation,
        rms_norm=shape.norm == "RMSNorm",
        rotary=any(shape.ropes),
        experts=1,
        experts_per_token=1,
        vocabulary=shape.vocab,
        tied=shape.tied,
        layers=(_layer(shape),) * shape.layers,
        embedding=Unit(divided=vocabulary, copied=positions * shape.hidden),
        head=Unit(divided=0 if shape.tied else vocabulary),
        final=Unit(copied=shape.hidden * len(shape.norm_leaves)),
        qk_norm=shape.qk_norm,
        output_norms=shape.output_norms,
        rotations=len({rope for rope in shape.ropes if rope is not None}),
    )


def _layer(shape: BackboneShape) -> Unit:
    names = shape.names
    divided, copied = 0, len(names.layer_norms) * shape.hidden * len(shape.norm_leaves)
    copied += len(names.head_norms) * shape.head_dim
    for op in BASE_OPS:
        divided += shape.in_features(op) * shape.out_features(op)
        if shape.biases[op]:
            bias = shape.out_features(op)
            divided, copied = (divided + bias, copied) if op in COLUMN_PARALLEL else (divided, copied + bias)
    return Unit(divided, copied)
