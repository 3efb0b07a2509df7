"""Prefix tuning (Li and Liang, 2021), as in peft without projection: learned keys and values before every sequence.

`prompt_embeddings` is `[P, layers x 2 x key-value heads x head size]`: for each layer the key, then the value. A
pipeline stage holds the columns of its layers; every tensor rank holds all heads of them and uses its own, so the
gradient is partial. Keys are put before the sequence unrotated, as peft's cache does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, TaskAdapter, register
from megatron_mux.adapters.configs import prefix_config
from megatron_mux.adapters.targets import Sizes
from megatron_mux.layout import MicroBatch

_KEY = "prompt_embeddings"


class PrefixAdapter(Adapter):
    """The prefix of one task in one layer."""

    stages = frozenset({"extend"})

    def __init__(self, owner: PrefixTuning, layer: int, place: int) -> None:
        self.owner = owner
        self.layer = layer
        self.place = place

    def extend(self, batch: MicroBatch) -> None:
        """Leave key and value, `[P, key-value heads on this rank, D]` each, where core attention looks."""
        owner = self.owner
        shape = owner.host.shape
        table = owner.table.unflatten(1, (-1, 2, shape.kv_heads, shape.head_dim))
        first, stop = owner.heads
        pair = table[:, self.place, :, first:stop].to(owner.host.dtype)  # [P, 2, heads, D]
        batch.prefix.setdefault(self.layer, {})[owner.name] = (pair[:, 0], pair[:, 1])


@register
class PrefixTuning(TaskAdapter):
    """Prefix tuning of one task."""

    peft_type = "PREFIX_TUNING"

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        host, shape = self.host, self.host.shape
        self.heads = _heads_of_rank(shape.kv_heads, host.parallel.tp_rank, host.parallel.tp_size)
        layers = host.layers
        width = 2 * shape.kv_heads * shape.head_dim
        index = torch.cat([torch.arange(layer * width, (layer + 1) * width) for layer in layers])
        full_shape = (self.spec.num_virtual_tokens, shape.layers * width)
        self.table: nn.Parameter = self.parameter(
            _KEY, full_shape, _normal, dim=1, index=index, partial=True, owner=host.first_tensor_rank
        )
        place = {layer: i for i, layer in enumerate(layers)}
        for op, info in enumerate(host.base_ops):
            if info.name == "linear_qkv":
                self.at[op] = PrefixAdapter(self, info.layer, place[info.layer])

    @staticmethod
    def tensor_shapes(spec: Any, paths: Sequence[str], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `TaskAdapter.tensor_shapes`."""
        return {_KEY: (spec.num_virtual_tokens, sizes.layers * 2 * sizes.kv_heads * sizes.head_dim)}

    def config_dict(self) -> dict[str, Any]:
        """See `TaskAdapter.config_dict`."""
        return prefix_config(self.spec, self.host.shape)


def _heads_of_rank(heads: int, rank: int, size: int) -> tuple[int, int]:
    """First and one past the last key-value head that core attention sees on a tensor rank."""
    if heads >= size:
        return rank * (heads // size), (rank + 1) * (heads // size)
    head = rank // (size // heads)
    return head, head + 1


def _normal(full: Tensor, generator: torch.Generator) -> None:
    full.normal_(generator=generator)
