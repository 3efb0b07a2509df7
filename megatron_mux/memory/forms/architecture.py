"""A model's widths and parameters, as far as they decide how much memory it takes when it is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_mux.base_ops import BaseOpName
from megatron_mux.memory.optimizers import Shapes


@dataclass(frozen=True)
class Unit:
    """Parameters that are used together: a layer, the embedding, the output layer.

    Attributes:
        divided: Values that tensor ranks divide among themselves.
        copied: Values that each of them has: norms, biases behind a sum, positions.
        experts: Values of all experts, which tensor ranks divide and expert ranks share out.
        shapes: Of the tensors, undivided; nothing where only adapters are trained.
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
        hidden, heads, kv_heads, head_dim: Sizes.
        ffn: Inner width of the MLP, of one expert where there are several.
        gated: Whether the MLP multiplies an activated half with a plain half.
        activation: Hugging Face's name of the MLP's activation function.
        rms_norm: Whether norms are RMS norms.
        rotary: Whether queries and keys are rotated.
        experts: How many experts a layer has; 1: a plain MLP.
        experts_per_token: How many of them compute a token.
        vocabulary: Tokens.
        tied: Whether the output layer is the token embedding.
        layers: The layers' units, in order.
        embedding: Parameters before the layers.
        head: The output layer's own parameters; none of its weights if tied.
        final: Parameters behind the layers besides the output layer's.
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
    activation: str
    rms_norm: bool
    rotary: bool
    experts: int
    experts_per_token: int
    vocabulary: int
    tied: bool
    layers: tuple[Unit, ...]
    embedding: Unit
    head: Unit
    final: Unit
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

    def tensor_problem(self, tensor: int) -> str | None:
        """Why `tensor` ranks cannot share a layer; None if they can."""
        if self.heads % tensor:
            return f"{self.heads} attention heads cannot be divided among {tensor} GPUs"
        if self.kv_heads % tensor and tensor % self.kv_heads:
            return f"{self.kv_heads} key-value heads cannot be shared by {tensor} GPUs"
        if self.ffn % tensor:
            return f"an MLP of width {self.ffn} cannot be divided among {tensor} GPUs"
        return None
