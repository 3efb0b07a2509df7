"""Mistral: Llama with a window over the latest positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.family import Family, Fields
from megatron_mux.backbone.shape import BackboneShape


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full)
    return replace(shape, windows=(read.window(full),) * shape.layers)


FAMILY = Family(
    model_type="mistral",
    fields=Fields(used=like.USED | {"sliding_window"}, ignored=like.IGNORED),
    shape=_shape,
)
