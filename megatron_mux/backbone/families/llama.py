"""Llama and what shares its architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _llama_like as like

FAMILY = Family(
    shape=like.shape,
    used=like.USED | {"attention_bias", "mlp_bias"},
    ignored=like.IGNORED,
)
