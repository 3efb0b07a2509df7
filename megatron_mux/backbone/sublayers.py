"""Attention and MLP of a layer around linear modules, Megatron's or plain ones.

Not Megatron's own: those launch several kernels between their products where one does.
Shapes: T rows, H hidden, h query heads and g key-value heads on this rank, D features of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megatron_mux.backbone.attention import SegmentAttention
from megatron_mux.backbone.norms import FrozenNorm
from megatron_mux.backbone.rotary import Angles
from megatron_mux.kernels.pointwise.arguments import Heads
from megatron_mux.kernels.pointwise.functions import activation, turn
from megatron_mux.shape import BackboneShape


class Attention(nn.Module):
    """Projections around core attention; `linear_qkv` makes, group by group, queries, a key and a value.

    With fewer key-value heads than tensor ranks, some ranks share a group: each has a part of its columns, gathers the
    whole, and keeps its own query heads.

    Args:
        shape: The backbone's.
        tensor: This rank and the number of ranks that divide the layer.
        linear_qkv: `[T, 1, H]` to `[T, 1, (h + 2 g) D]`.
        core_attention: Attends over segments.
        linear_proj: `[T, 1, h D]` to `[T, 1, H]`.
    """

    def __init__(
        self,
        shape: BackboneShape,
        tensor: tuple[int, int],
        linear_qkv: nn.Module,
        core_attention: SegmentAttention,
        linear_proj: nn.Module,
    ) -> None:
        super().__init__()
        self.size, self.queries, self.eps = shape.head_dim, shape.heads // shape.kv_heads, shape.norm_eps
        rank, ranks = tensor
        self.groups, self.sharing = shape.kv_heads, max(1, ranks // shape.kv_heads)
        self.group, self.share = divmod(rank, self.sharing)
        self.linear_qkv, self.core_attention, self.linear_proj = linear_qkv, core_attention, linear_proj
        if shape.qk_norm:
            self.q_layernorm = FrozenNorm(shape.norm, shape.head_dim, shape.norm_eps)
            self.k_layernorm = FrozenNorm(shape.norm, shape.head_dim, shape.norm_eps)
        self._normed = shape.qk_norm

    def forward(
        self, hidden: Tensor, attention_mask: None = None, attention_bias: Angles | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within segments.

        Args:
            hidden: `[T, 1, H]`.
            attention_mask: None; segments take its place.
            attention_bias: Cosine and sine of each token's angles; None without rotary embedding.

        Returns:
            Likewise `[T, 1, H]`, and its bias if the projection leaves that to be added.
        """
        weights = (self.q_layernorm.weight, self.k_layernorm.weight) if self._normed else (None, None)
        heads = Heads(self.size, self.queries, weights=weights, eps=self.eps)
        query, key, value = turn(self._gathered(self.linear_qkv(hidden)[0]), attention_bias, heads)
        if self.sharing > 1:
            query = query.chunk(self.sharing, dim=1)[self.share]
        attended = self.core_attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1))
        output: tuple[Tensor, Tensor | None] = self.linear_proj(attended)
        return output

    def _gathered(self, mixed: Tensor) -> Tensor:
        """The columns of this rank's group, if several ranks share it."""
        if self.sharing == 1:
            return mixed
        from megatron.core.tensor_parallel import mappings

        whole = mappings.all_gather_last_dim_from_tensor_parallel_region(mixed)
        own: Tensor = whole.chunk(self.groups, dim=-1)[self.group]
        return own


class Mlp(nn.Module):
    """Two products around an activation function, gated or not.

    Args:
        shape: The backbone's.
        linear_fc1: `[T, 1, H]` to the inner width, both halves of it if the MLP is gated.
        linear_fc2: Back to `[T, 1, H]`.
    """

    def __init__(self, shape: BackboneShape, linear_fc1: nn.Module, linear_fc2: nn.Module) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = linear_fc1, linear_fc2
        self.activation = activation(shape.activation, shape.gated)

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        """`[T, 1, H]` to the same, and its bias if the second product leaves that to be added."""
        output: tuple[Tensor, Tensor | None] = self.linear_fc2(self.activation(*self.linear_fc1(hidden)))
        return output
