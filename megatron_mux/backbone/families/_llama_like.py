"""The common base of Llama and families like it: names of tensors, rotary positions, RMS norms, a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.backbone.rotary import ropes_by_layer
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets, Linear, Names

NAMES = Names(
    base="model.",
    layer="model.layers.{}",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    input_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    ops={
        "linear_qkv": decoder.separate_qkv("self_attn"),
        "linear_proj": (Linear("self_attn.o_proj", ("out",)),),
        "linear_fc1": (Linear("mlp.gate_proj", ("gate",)), Linear("mlp.up_proj", ("up",))),
        "linear_fc2": (Linear("mlp.down_proj", ("out",)),),
    },
    ignorable=(r".*rotary_emb\.inv_freq",),
    targets=DefaultTargets(ia3=("k_proj", "v_proj", "down_proj")),
)

USED = decoder.USED | frozenset(
    """
    intermediate_size num_key_value_heads head_dim hidden_act rms_norm_eps
    rope_parameters rope_theta rope_scaling partial_rotary_factor
    """.split()
)

LAYER_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
"""What `config.windows` reads, or transformers to fill in `layer_types`."""

IGNORED = frozenset({"attention_dropout"})


def shape(
    full: Mapping[str, Any],
    names: Names = NAMES,
    activation_field: str = "hidden_act",
    partial_rotary: bool = False,
    qkv_bias: bool = False,
) -> BackboneShape:
    """The shape that these families share; a field that a family lacks has been refused before.

    Args:
        names: Where the family keeps its tensors.
        activation_field: The field that names the MLP's activation function.
        partial_rotary: Whether a config may ask to rotate a part of a head's features only.
        qkv_bias: Whether q, k and v have a bias whatever the config says.

    Raises:
        UserError: A field asks for something unsupported.
    """
    attention, mlp = bool(full.get("attention_bias")), bool(full.get("mlp_bias"))
    shape = decoder.shape(
        full,
        names,
        ffn=full["intermediate_size"],
        activation_field=activation_field,
        norm="RMSNorm",
        norm_eps=full["rms_norm_eps"],
        biases=decoder.biases(qkv=qkv_bias or attention, proj=attention, mlp=mlp),
    )
    return replace(
        shape,
        gated=True,
        position_limit=None,
        ropes=ropes_by_layer(full, shape.head_dim, shape.layers, partial_rotary),
        windows=read.windows(full, shape.layers),
    )
