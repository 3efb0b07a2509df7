"""Llama and what shares its architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.family import Family, Fields
from megatron_mux.backbone.shape import BackboneShape


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    attention, mlp = bool(full.get("attention_bias")), bool(full.get("mlp_bias"))
    return replace(like.shape(full), biases=decoder.biases(qkv=attention, proj=attention, mlp=mlp))


FAMILY = Family(
    model_type="llama",
    fields=Fields(used=like.USED | {"attention_bias", "mlp_bias"}, ignored=like.IGNORED),
    shape=_shape,
)
