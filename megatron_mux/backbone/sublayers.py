"""Norms of a frozen layer, and its attention and MLP around linear modules, Megatron's or plain ones.

Not Megatron's own: those launch several kernels between their products where one does.
Shapes: T rows, H hidden, h query heads and g key-value heads on this rank, D features of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_mux.backbone.rotary import Angles
from megatron_mux.batch.packed_batch import active
from megatron_mux.kernels.attention.segments import segment_attention
from megatron_mux.kernels.pointwise.arguments import Heads, Norm
from megatron_mux.kernels.pointwise.functions import activation, normalise, turn
from megatron_mux.shape import BackboneShape

NormKind = Literal["RMSNorm", "LayerNorm"]


class FrozenNorm(nn.Module):
    """A norm over the last dimension, without gradients of its weights.

    Args:
        kind: An RMS norm, or a LayerNorm, which has a bias.
        eps: Added to the mean square.
    """

    bias: nn.Parameter | None

    def __init__(self, kind: NormKind, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.centred = eps, kind == "LayerNorm"
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(hidden_size)) if self.centred else None)

    @property
    def frozen(self) -> Norm:
        """What kernels need of it."""
        return Norm(self.weight, self.bias, self.eps, self.centred)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return normalise(x, self.frozen)


class OutputNorm(nn.Module):
    """Holds the norm of a sublayer's output, in place of Megatron's bias-dropout-add: see `layer.add_residual`."""

    def __init__(self, norm: FrozenNorm) -> None:
        super().__init__()
        self.norm = norm


class SegmentAttention(nn.Module):
    """Core attention over the segments of the active micro-batch.

    Args:
        shape: The backbone's shape: window and scale of the layer.
        layer: Global index of the layer. (Megatron's own `layer_number` counts as if all stages were alike.)
        recompute: Compute attention again in the backward instead of keeping what it needs.
    """

    def __init__(self, shape: BackboneShape, layer: int, recompute: bool, **_: Any) -> None:
        super().__init__()
        self.layer = layer
        self.window = shape.windows[self.layer]
        self.scale = shape.scales[self.layer]
        self.recompute = recompute

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Attend.

        Args:
            query: `[T, 1, heads on this rank, D]`, rotated by its positions.
            key: `[T, 1, kv heads on this rank, D]`, likewise.
            value: `[T, 1, kv heads on this rank, D]`, or wider or narrower heads.

        Returns:
            `[T, 1, heads on this rank x D]`.
        """
        batch = active()

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if batch.carry is not None:
                key, value = batch.carry.extend(self.layer, key, value, batch.segments)
            attend = segment_attention if batch.cache is None else partial(batch.cache.attend, self.layer)
            return attend(
                query,
                key,
                value,
                batch.segments,
                scale=self.scale,
                window=self.window,
                prefix=batch.prefix.get(self.layer),
                bounds=batch.bounds,
            )

        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        out: Tensor
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(run, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            out = run(query, key, value)
        return out.flatten(1).unsqueeze(1)


class Attention(nn.Module):
    """Projections around core attention; `linear_qkv` makes, group by group, queries, a key and a value.

    With fewer key-value heads than tensor ranks, some ranks share a group: each has a part of its columns, gathers the
    whole, and keeps its own query heads.

    Args:
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
