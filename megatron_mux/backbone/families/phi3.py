"""Phi-3 and Phi-4: Llama with one module for q, k and v and one for both halves of the MLP.

LongRoPE has two sets of wavelengths, for sequences up to the original number of positions and for longer ones. Here
each sequence has the set of its own length; `transformers` takes the longest of a padded batch for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.family import Family, Fields
from megatron_mux.backbone.names import Module
from megatron_mux.backbone.shape import BackboneShape
from megatron_mux.base_ops import DefaultTargets

_NAMES = replace(
    like.NAMES,
    ops={
        **like.NAMES.ops,
        "linear_qkv": (Module("self_attn.qkv_proj", ("q", "k", "v")),),
        "linear_fc1": (Module("mlp.gate_up_proj", ("gate", "up")),),
    },
    # peft knows none: as for GPT-2, whose q, k and v are one module too.
    targets=DefaultTargets(lora=("qkv_proj",), ia3=("qkv_proj", "down_proj")),
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full, _NAMES, partial_rotary=True)
    return replace(shape, windows=(read.window(full),) * shape.layers)


FAMILY = Family(
    model_type="phi3",
    fields=Fields(
        used=like.USED | {"original_max_position_embeddings", "sliding_window"},
        ignored=like.IGNORED | {"embd_pdrop", "resid_pdrop"},
    ),
    shape=_shape,
)
