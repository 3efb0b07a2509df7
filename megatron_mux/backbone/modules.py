"""The parts of Megatron's layer that are ours: core attention on packed segments, norms, residual additions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_mux import layout, megatron_core
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.kernels.attention import segment_attention
from megatron_mux.kernels.pointwise import rms_norm, rotate

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


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
        attention_mask: None = None,
        attention_bias: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> Tensor:
        """Rotate queries and keys by their positions, then attend.

        Megatron would compute cosines and sines again in each layer. Here they are computed once a micro-batch and
        passed as `attention_bias`, the one argument that Megatron hands to core attention untouched.

        Args:
            query: `[T, 1, heads on this rank, D]`.
            key: `[T, 1, kv heads on this rank, D]`.
            value: Likewise.
            attention_mask: None; segments take its place.
            attention_bias: Cosine and sine of each token's angles, `[T, 1, D / 2]`; None without rotary embedding.

        Returns:
            `[T, 1, heads on this rank x D]`.
        """
        batch = layout.active()

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if batch.carry is not None:
                key, value = batch.carry.extend(self.layer, key, value, batch.segments)
            return segment_attention(
                query,
                key,
                value,
                batch.segments,
                scale=self.scale,
                window=self.window,
                prefix=batch.prefix.get(self.layer),
            )

        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if attention_bias is not None:
            query, key = rotate(query, *attention_bias), rotate(key, *attention_bias)
        out: Tensor
        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(run, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            out = run(query, key, value)
        return out.flatten(1).unsqueeze(1)


class FrozenRMSNorm(nn.Module):
    """RMS norm whose weight has no gradient."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return rms_norm(x, self.weight, self.eps)


class Norm:
    """Builds a norm: Transformer Engine's where importable on a GPU, else torch's.

    Megatron's wrapper of torch's norms refuses sequence parallelism, which would have to sum the gradients of their
    weights over ranks; frozen weights have none.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float, **_: Any
    ) -> nn.Module:
        """Megatron calls the class in a spec and uses what it returns as the module."""
        fused = megatron_core.fused_norm()
        if fused is not None:
            built: nn.Module = fused(config=config, hidden_size=hidden_size, eps=eps)
            return built
        return (
            FrozenRMSNorm(hidden_size, eps)
            if config.normalization == "RMSNorm"
            else nn.LayerNorm(hidden_size, eps)
        )


class NormThenAdd(nn.Module):
    """Adds the norm of a sublayer's output to the hidden states, in place of Megatron's bias-dropout-add.

    Args:
        norm: The norm.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Megatron asks for the function first, then calls it: see `_add`."""
        return self._add

    def _add(self, output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        """`[T, 1, H]` output and its bias, if any, and the hidden states `[T, 1, H]` that it is added to."""
        hidden, bias = output
        normed: Tensor = self.norm(hidden if bias is None else hidden + bias)
        return residual + normed
