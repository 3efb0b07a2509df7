"""StarCoder2: rotary positions and grouped heads as in Llama, with layer norms, biases and a plain MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.rotary import ropes_by_layer
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets, Linear

_NAMES = replace(
    like.NAMES,
    ops={
        **like.NAMES.ops,
        "linear_fc1": (Linear("mlp.c_fc", ("fc",)),),
        "linear_fc2": (Linear("mlp.c_proj", ("out",)),),
    },
    targets=DefaultTargets(
        ia3=("k_proj", "v_proj", "c_proj"), ia3_feedforward=("c_proj",), bottleneck=("o_proj", "c_proj")
    ),
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    bias = bool(full["use_bias"])
    shape = decoder.shape(
        full,
        _NAMES,
        ffn=full["intermediate_size"],
        activation_field="hidden_act",
        norm="LayerNorm",
        norm_eps=full["norm_epsilon"],
        biases=decoder.biases(qkv=bias, proj=bias, mlp=bias),
    )
    return replace(
        shape,
        position_limit=None,
        ropes=ropes_by_layer(full, shape.head_dim, shape.layers, False),
        windows=read.windows(full, shape.layers),
    )


_OLD = frozenset({"layer_norm_epsilon", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"})
"""Fields of the published checkpoints that transformers does not read."""

FAMILY = Family(
    shape=_shape,
    used=(like.USED - {"rms_norm_eps"}) | {"norm_epsilon", "use_bias", "sliding_window"},
    ignored=like.IGNORED | {"residual_dropout", "embedding_dropout"} | _OLD,
    fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",), "scale_attn_weights": (True,)},
)
