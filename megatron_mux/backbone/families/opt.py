"""OPT: learned positions that start at 2, norms before each block. OPT-350m's norms after it are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.family import Family, Fields, Module, Names
from megatron_mux.backbone.shape import BackboneShape

_NAMES = Names(
    base="model.",
    layer="model.decoder.layers.{}",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    final_norm="model.decoder.final_layer_norm",
    input_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    ops={
        "linear_qkv": (
            Module("self_attn.q_proj", ("q",)),
            Module("self_attn.k_proj", ("k",)),
            Module("self_attn.v_proj", ("v",)),
        ),
        "linear_proj": (Module("self_attn.out_proj", ("out",)),),
        "linear_fc1": (Module("fc1", ("fc",)),),
        "linear_fc2": (Module("fc2", ("out",)),),
    },
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    hidden, heads, layers = (
        int(full["hidden_size"]),
        int(full["num_attention_heads"]),
        int(full["num_hidden_layers"]),
    )
    size = read.head_dim({}, hidden, heads)
    if full.get("word_embed_proj_dim", hidden) != hidden:
        read.refuse(
            "word_embed_proj_dim", full["word_embed_proj_dim"], f"hidden_size {hidden} (no projections)"
        )
    bias = bool(full.get("enable_bias", True))
    return BackboneShape(
        family="opt",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        ffn=int(full["ffn_dim"]),
        vocab=int(full["vocab_size"]),
        padded_vocab=int(full["vocab_size"]),
        max_positions=int(full["max_position_embeddings"]),
        position_limit=int(full["max_position_embeddings"]),
        position_offset=2,
        norm="LayerNorm",
        norm_eps=1e-5,
        activation=read.activation("activation_function", full["activation_function"]),
        gated=False,
        tied=bool(full.get("tie_word_embeddings", True)),
        biases={"linear_qkv": bias, "linear_proj": bias, "linear_fc1": bias, "linear_fc2": bias},
        qk_norm=False,
        rope=None,
        windows=(None,) * layers,
        scales=(size**-0.5,) * layers,
        eos_ids=read.token_ids(full.get("eos_token_id")),
        bos_id=full.get("bos_token_id"),
        pad_id=full.get("pad_token_id"),
        config=full,
    )


FAMILY = Family(
    model_type="opt",
    names=_NAMES,
    fields=Fields(
        used=frozenset(
            """
            hidden_size num_attention_heads num_hidden_layers ffn_dim max_position_embeddings activation_function
            word_embed_proj_dim enable_bias
            """.split()
        ),
        ignored=frozenset({"dropout", "attention_dropout", "activation_dropout", "layerdrop", "init_std"}),
        fixed={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
        },
    ),
    shape=_shape,
)
