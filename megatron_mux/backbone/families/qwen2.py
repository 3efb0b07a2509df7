"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and windows on some layers."""

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

_NAMES = replace(like.NAMES, targets=DefaultTargets())


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full, _NAMES)
    return replace(
        shape,
        biases=decoder.biases(qkv=True, proj=False, mlp=False),
        windows=read.windows_by_layer_type(full, shape.layers, like.used_window(full)),
    )


FAMILY = Family(
    model_type="qwen2",
    fields=Fields(
        used=like.USED | like.WINDOWS_USED,
        ignored=like.IGNORED,
        fixed={"use_mrope": (False,)},
    ),
    shape=_shape,
)
