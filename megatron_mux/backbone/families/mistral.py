"""Mistral: Llama with a window over the latest positions."""

from __future__ import annotations

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _llama_like as like

FAMILY = Family(
    shape=like.shape,
    used=like.USED | {"sliding_window"},
    ignored=like.IGNORED,
)
