"""Multi-head latent attention (DeepSeek-V2) in the place of Megatron's attention.

Not Megatron's `MLASelfAttention`: that rotates by positions of its own, and attends without regard to segments. Here
the input is copied or gathered once. Every tensor rank makes the whole of the narrow rows (latents), and its heads from
them, so all gradients are partial up to the input, where they are summed: no latent needs a collective of its own.

Shapes: T tokens, H hidden, h heads on this rank, D features of a query or key, W of them rotated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux.base_ops import LATENT_OPS, REPLICATED
from megatron_mux.kernels.pointwise.functions import rotate_heads
from megatron_mux.megatron_core import gather_input
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape


class LocalLinear(nn.Module):
    """A rank's part of a linear module, or all of it, whose input the caller has spread.

    It has what adapters ask of Megatron's linear modules.
    """

    explicit_expert_comm = True
    skip_bias_add = False
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`[T, 1, in]` to `[T, 1, out]`, and no bias to add."""
        return F.linear(x, self.weight, self.bias), None


class LatentAttention(nn.Module):
    """Attention of a layer.

    Args:
        norms: Of the latents, by name.
        core_attention: Attends over segments.
        linear_proj: Megatron's `RowParallelLinear`.

    Attributes:
        explicit_expert_comm: Whether the caller spreads the input over tensor ranks: see `pieces.without_collectives`.
    """

    explicit_expert_comm = False
    linear_q: nn.Module
    linear_q_down: nn.Module
    linear_q_up: nn.Module
    linear_kv_down: nn.Module
    linear_kv_up: nn.Module
    q_norm: nn.Module
    kv_norm: nn.Module

    def __init__(
        self,
        shape: BackboneShape,
        parallel: Parallel,
        norms: dict[str, nn.Module],
        core_attention: nn.Module,
        linear_proj: nn.Module,
    ) -> None:
        super().__init__()
        assert shape.latent is not None
        self.latent, self.head_dim, self.parallel = shape.latent, shape.head_dim, parallel
        for op in (op for op in shape.attention_ops if op in LATENT_OPS):
            parts = 1 if op in REPLICATED else parallel.tp_size
            made = LocalLinear(shape.in_features(op), shape.out_features(op) // parts, shape.biases[op])
            setattr(self, op, made)
        for name, norm in norms.items():
            setattr(self, name, norm)
        self.core_attention, self.linear_proj = core_attention, linear_proj

    def forward(
        self, hidden: Tensor, attention_mask: None = None, attention_bias: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within segments.

        Args:
            hidden: `[T, 1, H]`, this rank's rows of it with sequence parallelism.
            attention_mask: None; segments take its place.
            attention_bias: Cosine and sine `[T, 1, W / 2]` of each token's angles.

        Returns:
            Likewise `[T, 1, H]`, and its bias if there is one.
        """
        latent, x = self.latent, self._gather_input(hidden)
        narrow, rotated = self.linear_kv_down(x)[0].split([latent.rank, latent.rotated], dim=-1)
        query = self._queries(x).unflatten(-1, (-1, self.head_dim)).squeeze(1)
        made = self.linear_kv_up(self.kv_norm(narrow))[0]
        key, value = (
            made.unflatten(-1, (-1, latent.plain + latent.value))
            .squeeze(1)
            .split([latent.plain, latent.value], dim=-1)
        )
        cos, sin = attention_bias
        query = self.rotate(query, cos, sin, latent.plain)
        shared = self.rotate(rotated, cos, sin).expand(-1, key.shape[1], -1)
        key = torch.cat((key, shared), dim=-1)
        attended = self.core_attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _queries(self, x: Tensor) -> Tensor:
        """`[T, 1, H]` to `[T, 1, h D]`."""
        if self.latent.query_rank is None:
            query: Tensor = self.linear_q(x)[0]
        else:
            query = self.linear_q_up(self.q_norm(self.linear_q_down(x)[0]))[0]
        return query

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, first: int = 0) -> Tensor:
        """Rotate `[T, heads, first + W]` from a feature on; those of queries and keys come out in the same order."""
        return rotate_heads(x, cos, sin, first, self.latent.interleaved)

    def _gather_input(self, hidden: Tensor) -> Tensor:
        """All rows, on every tensor rank; the backward sums their gradients over tensor ranks."""
        if self.parallel.tp_size == 1 or self.explicit_expert_comm:
            # A view, cut into pieces or not: its strides decide which product a matrix library computes, to the bit.
            return hidden.view_as(hidden)
        return gather_input(hidden, self.parallel.tp_group, self.parallel.sequence_parallel)
