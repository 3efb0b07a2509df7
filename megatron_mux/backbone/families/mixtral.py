"""Mixtral: Mistral with experts in each layer; what a row's experts return is weighted in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _experts
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.expert_shape import ExpertNames, Routing
from megatron_mux.shape import BackboneShape

_NAMES = _experts.names(like.NAMES)
_STORED = ExpertNames(
    router="mlp.gate",
    stored_router="block_sparse_moe.gate",
    stored="block_sparse_moe.experts.{}",
    gate="w1",
    up="w3",
    down="w2",
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full, _NAMES)
    return _experts.with_experts(
        shape,
        full,
        count=int(full["num_local_experts"]),
        ffn=shape.ffn,
        routing=Routing(top_k=int(full["num_experts_per_tok"])),
        names=_STORED,
    )


FAMILY = Family(
    shape=_shape,
    used=like.USED | {"num_local_experts", "num_experts", "num_experts_per_tok", "sliding_window"},
    ignored=_experts.IGNORED,
    fixed={"router_jitter_noise": (0, None)},
)
