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
from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Work
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.kind import AdapterSpec, Sample
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import COMMON_FIELDS, NOT_YET, PeftField, not_yet
from megatron_mux.adapters.tensors import AdapterTensor
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.section import LARGEST_SIZE
from megatron_mux.shape import BackboneShape

_KEY = "prompt_embeddings"


class _KeyAndValue(torch.autograd.Function):
    """A layer's keys and values: views, nothing is computed. Their gradients are added where they belong."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, pair: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        ctx.gradient = gradient
        return pair[:, 0], pair[:, 1]

    @staticmethod
    def backward(ctx: Any, key: Tensor, value: Tensor) -> tuple[None, None, None]:
        ctx.gradient[:, 0].add_(key)
        ctx.gradient[:, 1].add_(value)
        return None, None, None


class _Prefix(Adapter):
    """The prefix of one task in one layer."""

    stages = frozenset({"extend"})

    def __init__(self, owner: PrefixTuning, layer: int) -> None:
        self.owner = owner
        self.layer = layer
        self.place = owner.places[layer]

    def extend(self, batch: PackedBatch) -> None:
        """Add key and value, `[P, key-value heads on this rank, D]` each, to the micro-batch for core attention."""
        owner, prefix = self.owner, self.owner.prefix
        pair, gradient = self._own(owner.flat_params.copy_of(prefix)), self._own(prefix.value.grad)
        made: Any = _KeyAndValue.apply(owner.host.anchor, pair, gradient)  # type: ignore[no-untyped-call]
        batch.prefix.setdefault(self.layer, {})[owner.name] = made

    def _own(self, prefix: Tensor | None) -> Tensor:
        """The layer's part of the prefix, or of its gradient: `[P, 2, key-value heads on this rank, D]`."""
        assert prefix is not None
        shape, (first, stop) = self.owner.host.shape, self.owner.heads
        whole: Tensor = prefix.unflatten(1, (-1, 2, shape.kv_heads, shape.head_dim))
        return whole[:, self.place, :, first:stop]


class PrefixTuning(TaskAdapter):
    """Prefix tuning of one task."""

    def build(self) -> None:
        """See `TaskAdapter.build`: a stage has the columns of its layers."""
        parallel, shape = self.host.parallel, self.host.shape
        self.heads = _heads_of_rank(shape.kv_heads, parallel.tp_rank, parallel.tp_size)
        self.places = {layer: i for i, layer in enumerate(self.host.layers)}
        if self.places:
            width = 2 * _width(shape)
            index = torch.cat([torch.arange(layer * width, (layer + 1) * width) for layer in self.places])
            self.prefix = self.make(_KEY, dim=1, index=index)
        super().build()

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> _Prefix:
        """See `TaskAdapter.adapt`."""
        return _Prefix(self, modules[0][0].info.layer)


def _heads_of_rank(heads: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of key-value heads that core attention sees on a tensor rank."""
    if heads >= size:
        return rank * (heads // size), (rank + 1) * (heads // size)
    head = rank // (size // heads)
    return head, head + 1


def _width(shape: BackboneShape) -> int:
    """Return the width of a layer's keys."""
    return shape.kv_heads * shape.head_dim


class PrefixTuningSpec(AdapterSpec):
    """Prefix tuning (`peft.PrefixTuningConfig`): learned keys and values in front of every sequence."""

    peft_type: Literal["PREFIX_TUNING"]
    """The method."""
    num_virtual_tokens: int = Field(ge=1, le=LARGEST_SIZE)
    """Length of the prefix."""

    run_time = PrefixTuning
    refused: ClassVar[Mapping[str, PeftField]] = {
        **COMMON_FIELDS,
        **not_yet(False, "prefix_projection"),
        "init_weights": PeftField(NOT_YET, (None,), default=None, of_weights=("zero",)),
        **{
            name: PeftField("follows from the backbone: leave it out", (None,), from_backbone=True)
            for name in ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
        },
        "encoder_hidden_size": PeftField(
            "belongs to prefix_projection, which is not supported: leave it out", (None,), from_backbone=True
        ),
    }

    @property
    def virtual_tokens(self) -> int:
        """See `AdapterSpec.virtual_tokens`."""
        return self.num_virtual_tokens

    def default_targets(self, shape: BackboneShape) -> list[str]:
        """The modules that make queries, keys and values.

        Raises:
            UserError: The backbone has multi-head latent attention, whose cache holds no keys and values.
        """
        shape.refuse("PREFIX_TUNING", "latent")
        return [linear.path for linear in shape.names.ops["linear_qkv"]]

    def shared_tensors(self, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.shared_tensors`."""
        size = (self.num_virtual_tokens, shape.layers * 2 * _width(shape))
        return {_KEY: AdapterTensor(size, None, lambda full, generator: full.normal_(generator=generator))}

    def config(self, shape: BackboneShape) -> dict[str, Any]:
        """See `AdapterSpec.config`; peft counts key-value heads where it says attention heads."""
        width = _width(shape)
        fields = {
            "encoder_hidden_size": width,
            "num_attention_heads": shape.kv_heads,
            "num_layers": shape.layers,
            "num_transformer_submodules": 1,
            "token_dim": width,
        }
        return dict(sorted((super().config(shape) | fields).items()))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """None: a prefix costs longer keys, which are counted with attention."""
        return []

    def curve(self, modules: int) -> None:
        """See `AdapterSpec.curve`."""

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`."""
        return Work(0.0, 0.0)


KIND = PrefixTuningSpec
