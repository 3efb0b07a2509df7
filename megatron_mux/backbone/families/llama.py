"""Llama and what shares its architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.family import Family, Fields
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.layout import BaseOpName


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    attention, mlp = bool(full.get("attention_bias")), bool(full.get("mlp_bias"))
    biases: dict[BaseOpName, bool] = {
        "linear_qkv": attention,
        "linear_proj": attention,
        "linear_fc1": mlp,
        "linear_fc2": mlp,
    }
    return replace(like.shape(full), biases=biases)


FAMILY = Family(
    model_type="llama",
    names=like.NAMES,
    fields=Fields(used=like.USED | {"attention_bias", "mlp_bias"}, ignored=like.IGNORED),
    shape=_shape,
)
