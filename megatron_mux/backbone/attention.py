"""Core attention over the segments of the active micro-batch, whatever layer it is part of."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_mux.batch.micro_batch import active
from megatron_mux.kernels.attention.segments import segment_attention
from megatron_mux.shape import BackboneShape


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
