"""Qwen3: Llama with queries and keys normalised head by head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.family import Family, Fields
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.base_ops import DefaultTargets

_NAMES = replace(like.NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", targets=DefaultTargets())


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full, _NAMES)
    attention = bool(full.get("attention_bias"))
    return replace(
        shape,
        biases=decoder.biases(qkv=attention, proj=attention, mlp=False),
        windows=read.windows_by_layer_type(full, shape.layers, like.used_window(full)),
    )


FAMILY = Family(
    model_type="qwen3",
    fields=Fields(
        used=like.USED | like.WINDOWS_USED | {"attention_bias"},
        ignored=like.IGNORED,
    ),
    shape=_shape,
)
