"""The layers of a backbone as plain torch modules, for a process without Megatron-Core and process groups.

They compute what Megatron-Core's layers compute on one tensor rank, and are called alike, so weights are filled, and
adapters attach, in the same way. The client of split fine-tuning has its first and last layers so.

Shapes: T tokens in the micro-batch, H hidden, K and N input and output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux.backbone.sublayers import Attention, FrozenNorm, Mlp, OutputNorm, SegmentAttention
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape


def build(
    shape: BackboneShape,
    dtype: torch.dtype,
    layers: range,
    recompute_attention: bool,
    ends: tuple[bool, bool],
) -> nn.Module:
    """Build some layers on the meta device: they take no memory until they are filled.

    Args:
        recompute_attention: Compute core attention again in the backward.
        ends: Whether to add the embedding, and the final norm with the output layer.

    Raises:
        UserError: The backbone has experts or latent attention.
    """
    if shape.experts is not None or shape.latent is not None:
        what = "experts" if shape.experts is not None else "latent attention"
        raise UserError(
            f"The layers of a {shape.family} have {what}: without Megatron-Core they cannot be computed."
        )
    with torch.device("meta"):
        model = nn.Module()
        model.decoder = nn.Module()
        model.decoder.layers = nn.ModuleList(Layer(shape, layer, recompute_attention) for layer in layers)
        if ends[0]:
            model.embedding = Embedding(shape)
        if ends[1]:
            model.decoder.final_layernorm = FrozenNorm(shape.norm, shape.hidden, shape.norm_eps)
            model.output_layer = nn.Linear(shape.hidden, shape.padded_vocab, bias=False)
        return model.to(dtype).eval()


class Embedding(nn.Module):
    """The embedding of tokens, and of positions where they are learned."""

    reduce_scatter_embeddings = False

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.padded_vocab, shape.hidden)
        if shape.position_limit is not None:
            self.position_embeddings = nn.Embedding(shape.learned_positions, shape.hidden)


class PlainLinear(nn.Module):
    """A linear module with what adapters ask of Megatron's; its bias is added after the product, as there."""

    skip_bias_add = False
    explicit_expert_comm = False
    bias: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, bias: bool, column_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
        self._column_parallel = column_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`[T, 1, K]` to `[T, 1, N]`; nothing is left to add."""
        if self._column_parallel or self.bias is None:
            return F.linear(x, self.weight, self.bias), None
        return F.linear(x, self.weight) + self.bias, None


class Layer(nn.Module):
    """The parts of a transformer layer, named as Megatron's are: see `layer.compute_layer`."""

    def __init__(self, shape: BackboneShape, layer: int, recompute_attention: bool) -> None:
        super().__init__()

        def norm() -> FrozenNorm:
            return FrozenNorm(shape.norm, shape.hidden, shape.norm_eps)

        self.input_layernorm, self.pre_mlp_layernorm = norm(), norm()
        self.self_attention = Attention(
            shape,
            (0, 1),
            _linear(shape, "linear_qkv", (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
            SegmentAttention(shape, layer, recompute_attention),
            _linear(shape, "linear_proj", shape.hidden),
        )
        inner = shape.ffn * (2 if shape.gated else 1)
        self.mlp = Mlp(shape, _linear(shape, "linear_fc1", inner), _linear(shape, "linear_fc2", shape.hidden))
        self.self_attn_bda, self.mlp_bda = (
            OutputNorm(norm()) if shape.output_norms else None for _ in range(2)
        )


def _linear(shape: BackboneShape, op: BaseOpName, outputs: int) -> PlainLinear:
    column_parallel = op in ("linear_qkv", "linear_fc1")
    return PlainLinear(shape.in_features(op), outputs, shape.biases[op], column_parallel)
