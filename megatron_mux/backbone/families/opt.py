"""OPT: learned positions that start at 2, norms before each block. OPT-350m's norms after it are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.config import Family, refuse
from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets, Linear, Names

_NAMES = Names(
    base="model.",
    layer="model.decoder.layers.{}",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    ops={
        "linear_qkv": decoder.separate_qkv("self_attn"),
        "linear_proj": (Linear("self_attn.out_proj", ("out",)),),
        "linear_fc1": (Linear("fc1", ("fc",)),),
        "linear_fc2": (Linear("fc2", ("out",)),),
    },
    targets=DefaultTargets(
        ia3=("q_proj", "k_proj", "fc2"), ia3_feedforward=("fc2",), bottleneck=("out_proj", "fc2")
    ),
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    bias = bool(full["enable_bias"])
    shape = decoder.shape(
        full,
        _NAMES,
        ffn=full["ffn_dim"],
        activation_field="activation_function",
        norm="LayerNorm",
        norm_eps=1e-5,  # no field: torch's default
        biases=decoder.biases(qkv=bias, proj=bias, mlp=bias),
    )
    width = full["word_embed_proj_dim"]
    if width != shape.hidden:
        refuse("word_embed_proj_dim", width, f"hidden_size {shape.hidden} (no projections)")
    return replace(shape, position_offset=2)


FAMILY = Family(
    shape=_shape,
    used=decoder.USED | {"ffn_dim", "activation_function", "word_embed_proj_dim", "enable_bias"},
    ignored=frozenset({"dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std"}),
    fixed={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
)
