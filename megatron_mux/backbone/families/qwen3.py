"""Qwen3: Llama with queries and keys normalised head by head, and a head size of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.tensor_names import DefaultTargets

_NAMES = replace(like.NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", targets=DefaultTargets())

FAMILY = Family(
    shape=partial(like.shape, names=_NAMES),
    used=like.USED | like.LAYER_WINDOWS | {"attention_bias"},
    ignored=like.IGNORED,
)
