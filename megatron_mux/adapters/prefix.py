"""Prefix tuning (Li and Liang, 2021), as in peft without projection: learned keys and values before every sequence.

`prompt_embeddings` is `[P, layers x 2 x key-value heads x head size]`: for each layer the key, then the value. A
pipeline stage holds the columns of its layers; every tensor rank holds all heads of them and uses its own, so the
gradient is partial. Keys are put before the sequence unrotated, as peft's cache does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.costs import Kept, Place, Sample, Work
from megatron_mux.adapters.host import Host
from megatron_mux.adapters.kind import COMMON_FIELDS, AdapterSpec, AdapterTensor, not_yet
from megatron_mux.adapters.modules import Module, Shape
from megatron_mux.adapters.peft_config import stored_config
from megatron_mux.layout import MicroBatch
from megatron_mux.section import LARGEST_SIZE, Refused

_KEY = "prompt_embeddings"
_FROM_THE_BACKBONE = ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")


class PrefixTuningSpec(AdapterSpec):
    """Prefix tuning (`peft.PrefixTuningConfig`): learned keys and values in front of every sequence."""

    peft_type: Literal["PREFIX_TUNING"]
    """The method."""
    num_virtual_tokens: int = Field(ge=1, le=LARGEST_SIZE)
    """Length of the prefix."""

    decisive: ClassVar[frozenset[str]] = frozenset({"num_virtual_tokens"})
    from_weights: ClassVar[frozenset[str]] = frozenset({*_FROM_THE_BACKBONE, "encoder_hidden_size"})
    initial_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"init_weights": (None, "zero")}
    refused: ClassVar[Mapping[str, Refused]] = {
        **COMMON_FIELDS,
        **not_yet("prefix_projection"),
        **not_yet("init_weights", neutral=(None,)),
        **{name: Refused("follows from the backbone: leave it out", (None,)) for name in _FROM_THE_BACKBONE},
        "encoder_hidden_size": Refused(
            "belongs to prefix_projection, which is not supported: leave it out", (None,)
        ),
    }

    @property
    def virtual_tokens(self) -> int:
        """See `AdapterSpec.virtual_tokens`."""
        return self.num_virtual_tokens

    def default_targets(self, shape: Shape) -> list[str]:
        """The modules that make queries, keys and values."""
        return list(shape.layer_modules["linear_qkv"])

    def tensors(self, shape: Shape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.tensors`."""
        return {_KEY: AdapterTensor((self.num_virtual_tokens, shape.layers * 2 * _width(shape)), None)}

    def config(self, shape: Shape) -> dict[str, Any]:
        """See `AdapterSpec.config`; peft counts key-value heads where it says attention heads."""
        width = _width(shape)
        return stored_config(
            self,
            {
                "encoder_hidden_size": width,
                "init_weights": None,
                "modules_to_save": None,
                "num_attention_heads": shape.kv_heads,
                "num_layers": shape.layers,
                "num_transformer_submodules": 1,
                "num_virtual_tokens": self.num_virtual_tokens,
                "prefix_projection": False,
                "token_dim": width,
            },
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """None: a prefix costs longer keys, which are counted with attention."""
        return []

    def curve(self, modules: int) -> None:
        """See `AdapterSpec.curve`."""

    def work(self, place: Place) -> Work:
        """See `AdapterSpec.work`."""
        return Work(0.0, 0.0)

    def kept(self, place: Place, modules: Sequence[Module], shape: Shape) -> Kept:
        """See `AdapterSpec.kept`: keys and values of its `virtual_tokens` are counted with attention's."""
        return Kept()

    def attach(
        self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None
    ) -> TaskAdapter:
        """See `AdapterSpec.attach`."""
        return PrefixTuning(host, task, total_steps, initial)


def _width(shape: Shape) -> int:
    """Return the width of a layer's keys."""
    return shape.kv_heads * shape.head_dim


class PrefixTuning(TaskAdapter):
    """Prefix tuning of one task."""

    spec: PrefixTuningSpec

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        host, shape = self.host, self.host.shape
        self.heads = _heads_of_rank(shape.kv_heads, host.parallel.tp_rank, host.parallel.tp_size)
        layers = host.layers
        width = 2 * _width(shape)
        index = torch.cat([torch.arange(layer * width, (layer + 1) * width) for layer in layers])
        owner = host.first_tensor_rank
        self.table: nn.Parameter = self.make(
            _KEY, _normal, dim=1, index=index, partial=True, owner=owner
        ).value
        place = {layer: i for i, layer in enumerate(layers)}
        for op, info in enumerate(host.base_ops):
            if info.name == "linear_qkv":
                self.at[op] = _Prefix(self, info.layer, place[info.layer])


class _Prefix(Adapter):
    """The prefix of one task in one layer."""

    stages = frozenset({"extend"})

    def __init__(self, owner: PrefixTuning, layer: int, place: int) -> None:
        self.owner = owner
        self.layer = layer
        self.place = place

    def extend(self, batch: MicroBatch) -> None:
        """Add key and value, `[P, key-value heads on this rank, D]` each, to the micro-batch for core attention."""
        owner = self.owner
        shape = owner.host.shape
        table = owner.table.unflatten(1, (-1, 2, shape.kv_heads, shape.head_dim))
        first, stop = owner.heads
        pair = table[:, self.place, :, first:stop].to(owner.host.dtype)  # [P, 2, heads, D]
        batch.prefix.setdefault(self.layer, {})[owner.name] = (pair[:, 0], pair[:, 1])


def _heads_of_rank(heads: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of key-value heads that core attention sees on a tensor rank."""
    if heads >= size:
        return rank * (heads // size), (rank + 1) * (heads // size)
    head = rank // (size // heads)
    return head, head + 1


def _normal(full: Tensor, generator: torch.Generator) -> None:
    full.normal_(generator=generator)


KIND = PrefixTuningSpec
