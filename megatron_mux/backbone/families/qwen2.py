"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v, and windows on some layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.tensor_names import DefaultTargets

_NAMES = replace(like.NAMES, targets=DefaultTargets())

FAMILY = Family(
    shape=partial(like.shape, names=_NAMES, qkv_bias=True),
    used=like.USED | like.LAYER_WINDOWS,
    ignored=like.IGNORED,
    fixed={"use_mrope": (False,)},
)
