"""What Llama, Mistral, Qwen2 and Qwen3 share: names of tensors and most of the shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.family import Module, Names
from megatron_mux.backbone.shape import BackboneShape

NAMES = Names(
    base="model.",
    layer="model.layers.{}",
    embedding="model.embed_tokens",
    final_norm="model.norm",
    input_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    ops={
        "linear_qkv": (
            Module("self_attn.q_proj", ("q",)),
            Module("self_attn.k_proj", ("k",)),
            Module("self_attn.v_proj", ("v",)),
        ),
        "linear_proj": (Module("self_attn.o_proj", ("out",)),),
        "linear_fc1": (Module("mlp.gate_proj", ("gate",)), Module("mlp.up_proj", ("up",))),
        "linear_fc2": (Module("mlp.down_proj", ("out",)),),
    },
    ignorable=(r".*rotary_emb\.inv_freq",),
)

QK_NORM_NAMES = replace(NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")

USED = frozenset(
    """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    max_position_embeddings rms_norm_eps rope_parameters rope_theta rope_scaling partial_rotary_factor
    """.split()
)

IGNORED = frozenset({"attention_dropout"})


def shape(full: Mapping[str, Any]) -> BackboneShape:
    """The shape that these families share; each file replaces what differs."""
    hidden, heads, layers = (
        int(full["hidden_size"]),
        int(full["num_attention_heads"]),
        int(full["num_hidden_layers"]),
    )
    kv_heads = int(full.get("num_key_value_heads") or heads)
    read.divisible_heads(heads, kv_heads)
    size = read.head_dim(full, hidden, heads)
    return BackboneShape(
        family=str(full["model_type"]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        ffn=int(full["intermediate_size"]),
        vocab=int(full["vocab_size"]),
        padded_vocab=int(full["vocab_size"]),
        max_positions=int(full["max_position_embeddings"]),
        position_limit=None,
        position_offset=0,
        norm="RMSNorm",
        norm_eps=float(full["rms_norm_eps"]),
        activation=read.activation("hidden_act", full["hidden_act"]),
        gated=True,
        tied=bool(full.get("tie_word_embeddings")),
        biases={"linear_qkv": False, "linear_proj": False, "linear_fc1": False, "linear_fc2": False},
        qk_norm=False,
        rope=read.rope(full),
        windows=(None,) * layers,
        scales=(size**-0.5,) * layers,
        eos_ids=read.token_ids(full.get("eos_token_id")),
        bos_id=full.get("bos_token_id"),
        pad_id=full.get("pad_token_id"),
        config=full,
    )
