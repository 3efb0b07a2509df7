"""GPT-Neo: unscaled attention, every other layer over a local window, no bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.family import Family, Fields, Module, Names
from megatron_mux.backbone.shape import BackboneShape

_NAMES = Names(
    base="transformer.",
    layer="transformer.h.{}",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    mlp_norm="ln_2",
    ops={
        "linear_qkv": (
            Module("attn.attention.q_proj", ("q",)),
            Module("attn.attention.k_proj", ("k",)),
            Module("attn.attention.v_proj", ("v",)),
        ),
        "linear_proj": (Module("attn.attention.out_proj", ("out",)),),
        "linear_fc1": (Module("mlp.c_fc", ("fc",)),),
        "linear_fc2": (Module("mlp.c_proj", ("out",)),),
    },
    # Causal masks that old checkpoints carry.
    ignorable=(r".*\.attn\.attention\.(bias|masked_bias)",),
)


def _windows(full: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """`attention_types` counts out kinds of layers: [[["global", "local"], 12]]."""
    try:
        kinds = [kind for group, times in full["attention_types"] for _ in range(times) for kind in group]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        read.refuse("attention_types", full.get("attention_types"), f"global and local for {layers} layers")
    return tuple(int(full["window_size"]) if kind == "local" else None for kind in kinds)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    hidden, heads, layers = int(full["hidden_size"]), int(full["num_heads"]), int(full["num_layers"])
    return BackboneShape(
        family="gpt_neo",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=read.head_dim({}, hidden, heads),
        ffn=int(full.get("intermediate_size") or 4 * hidden),
        vocab=int(full["vocab_size"]),
        padded_vocab=int(full["vocab_size"]),
        max_positions=int(full["max_position_embeddings"]),
        position_limit=int(full["max_position_embeddings"]),
        position_offset=0,
        norm="LayerNorm",
        norm_eps=float(full["layer_norm_epsilon"]),
        activation=read.activation("activation_function", full["activation_function"]),
        gated=False,
        tied=bool(full.get("tie_word_embeddings", True)),
        biases={"linear_qkv": False, "linear_proj": True, "linear_fc1": True, "linear_fc2": True},
        qk_norm=False,
        rope=None,
        windows=_windows(full, layers),
        scales=(1.0,) * layers,
        eos_ids=read.token_ids(full.get("eos_token_id")),
        bos_id=full.get("bos_token_id"),
        pad_id=full.get("pad_token_id"),
        config=full,
    )


FAMILY = Family(
    model_type="gpt_neo",
    names=_NAMES,
    fields=Fields(
        used=frozenset(
            """
            hidden_size num_layers num_heads intermediate_size max_position_embeddings layer_norm_epsilon window_size
            activation_function attention_types attention_layers num_attention_heads num_hidden_layers
            """.split()
        ),
        ignored=frozenset({"resid_dropout", "embed_dropout", "attention_dropout"}),
    ),
    shape=_shape,
)
