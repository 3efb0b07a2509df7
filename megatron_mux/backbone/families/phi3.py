"""Phi-3 and Phi-4: Llama with one module for q, k and v and one for both halves of the MLP.

LongRoPE has two sets of wavelengths, for sequences up to the original number of positions and for longer ones. Here
each sequence has the set of its own length; `transformers` takes the longest of a padded batch for all of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.tensor_names import DefaultTargets, Linear

_NAMES = replace(
    like.NAMES,
    ops={
        **like.NAMES.ops,
        "linear_qkv": (Linear("self_attn.qkv_proj", ("q", "k", "v")),),
        "linear_fc1": (Linear("mlp.gate_up_proj", ("gate", "up")),),
    },
    # peft knows none: as for GPT-2, whose q, k and v are one module too.
    targets=DefaultTargets(lora=("qkv_proj",), ia3=("qkv_proj", "down_proj")),
)

FAMILY = Family(
    shape=partial(like.shape, names=_NAMES, partial_rotary=True),
    used=like.USED | {"original_max_position_embeddings", "sliding_window"},
    ignored=like.IGNORED | {"embd_pdrop", "resid_pdrop"},
)
