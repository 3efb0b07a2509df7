"""The layers of a backbone as plain torch modules, for a process without Megatron-Core and process groups.

They compute what Megatron-Core's layers compute on one tensor rank, and are called alike, so weights are filled, and
adapters attach, in the same way. The client of split fine-tuning has its first and last layers so.

Shapes: T tokens in the micro-batch, H hidden, K and N input and output width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux.backbone.attention import SegmentAttention
from megatron_mux.backbone.norms import NormThenAdd, make_norm
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.kernels.pointwise import ACTIVATIONS, gated
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
        shape: The backbone's.
        dtype: Of weights and hidden states.
        layers: Global indices of the layers.
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
            model.decoder.final_layernorm = make_norm(shape.norm, shape.hidden, shape.norm_eps)
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


class Attention(nn.Module):
    """Projections around core attention; `linear_qkv` holds, group by group, its queries, key and value."""

    def __init__(self, shape: BackboneShape, layer: int, recompute: bool) -> None:
        super().__init__()
        self.groups, self.width = shape.kv_heads, shape.head_dim
        self.queries = shape.heads // shape.kv_heads
        self.linear_qkv = _linear(shape, "linear_qkv", (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        self.core_attention = SegmentAttention(shape, layer, recompute)
        self.linear_proj = _linear(shape, "linear_proj", shape.hidden)
        if shape.qk_norm:
            self.q_layernorm = make_norm(shape.norm, shape.head_dim, shape.norm_eps)
            self.k_layernorm = make_norm(shape.norm, shape.head_dim, shape.norm_eps)

    def forward(self, x: Tensor, angles: Any) -> Tensor:
        """`[T, 1, H]` to the same."""
        mixed = self.linear_qkv(x)[0].view(*x.shape[:2], self.groups, -1)
        query, key, value = mixed.split([self.queries * self.width, self.width, self.width], dim=-1)
        query = query.reshape(*x.shape[:2], -1, self.width)
        if hasattr(self, "q_layernorm"):
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        attended = self.core_attention(query, key, value, attention_bias=angles)
        output: Tensor = self.linear_proj(attended)[0]
        return output


class Mlp(nn.Module):
    """The MLP of a layer, gated or not."""

    def __init__(self, shape: BackboneShape) -> None:
        super().__init__()
        self.linear_fc1 = _linear(shape, "linear_fc1", shape.ffn * (2 if shape.gated else 1))
        self.linear_fc2 = _linear(shape, "linear_fc2", shape.hidden)
        self._activation = ACTIVATIONS[shape.activation]
        self._gated = shape.gated
        self._fused = gated(shape.activation) if shape.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """`[T, 1, H]` to the same."""
        inner = self.linear_fc1(x)[0]
        if self._fused is not None:
            inner = self._fused(inner)
        elif self._gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        output: Tensor = self.linear_fc2(inner)[0]
        return output


class Layer(nn.Module):
    """A transformer layer; its halves are called as Megatron's are."""

    def __init__(self, shape: BackboneShape, layer: int, recompute_attention: bool) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return make_norm(shape.norm, shape.hidden, shape.norm_eps)

        self.input_layernorm, self.pre_mlp_layernorm = norm(), norm()
        self.self_attention = Attention(shape, layer, recompute_attention)
        self.mlp = Mlp(shape)
        if shape.output_norms:
            self.self_attn_bda, self.mlp_bda = NormThenAdd(norm()), NormThenAdd(norm())

    def _forward_attention(
        self, hidden_states: Tensor, attention_mask: None, attention_bias: Any
    ) -> tuple[Tensor, None]:
        output = self.self_attention(self.input_layernorm(hidden_states), attention_bias)
        return self._add("self_attn_bda", output, hidden_states), None

    def _forward_mlp(self, hidden: Tensor) -> Tensor:
        return self._add("mlp_bda", self.mlp(self.pre_mlp_layernorm(hidden)), hidden)

    def _add(self, name: str, output: Tensor, residual: Tensor) -> Tensor:
        if hasattr(self, name):
            added: Tensor = getattr(self, name)(False, False)((output, None), residual, 0.0)
            return added
        return residual + output

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, attention_bias: Any = None
    ) -> tuple[Tensor, None]:
        """`[T, 1, H]` to the same; the second result is there for callers of Megatron's layer."""
        attended, _ = self._forward_attention(hidden_states, attention_mask, attention_bias)
        return self._forward_mlp(attended), None


def _linear(shape: BackboneShape, op: BaseOpName, outputs: int) -> PlainLinear:
    column_parallel = op in ("linear_qkv", "linear_fc1")
    return PlainLinear(shape.in_features(op), outputs, shape.biases[op], column_parallel)
