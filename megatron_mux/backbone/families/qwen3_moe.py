"""Qwen3-MoE: Qwen3 with experts, in all layers or some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.config import Family, refuse
from megatron_mux.backbone.families import _experts
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.expert_shape import ExpertNames, Routing
from megatron_mux.shape import BackboneShape

_NAMES = _experts.names(replace(like.NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"))
_STORED = ExpertNames(
    router="mlp.gate",
    stored_router="mlp.gate",
    stored="mlp.experts.{}",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full, _NAMES)
    step = full["decoder_sparse_step"]
    if type(step) is not int or step < 1:
        refuse("decoder_sparse_step", step, "a positive whole number")
    dense = {layer for layer in range(shape.layers) if (layer + 1) % step} | set(full["mlp_only_layers"])
    return _experts.with_experts(
        shape,
        full,
        count=int(full.get("num_local_experts") or full["num_experts"]),
        ffn=int(full["moe_intermediate_size"]),
        routing=Routing(
            top_k=int(full["num_experts_per_tok"]), normalised=bool(full["norm_topk_prob"]), cast=True
        ),
        names=_STORED,
        dense=dense,
    )


FAMILY = Family(
    shape=_shape,
    used=like.USED
    | like.LAYER_WINDOWS
    | frozenset(
        """
        attention_bias num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
        decoder_sparse_step mlp_only_layers
        """.split()
    ),
    ignored=_experts.IGNORED,
)
