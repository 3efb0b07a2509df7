"""GPT-2: one fused, transposed module for q, k and v; learned positions; a scale that may depend on the layer."""

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
        "linear_qkv": (Module("attn.c_attn", ("q", "k", "v")),),
        "linear_proj": (Module("attn.c_proj", ("out",)),),
        "linear_fc1": (Module("mlp.c_fc", ("fc",)),),
        "linear_fc2": (Module("mlp.c_proj", ("out",)),),
    },
    transposed=True,
    # Causal masks that old checkpoints carry.
    ignorable=(r".*\.attn\.(bias|masked_bias)",),
)


def _scales(full: Mapping[str, Any], layers: int, head_dim: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if full.get("scale_attn_weights", True) else 1.0
    by_layer = bool(full.get("scale_attn_by_inverse_layer_idx"))
    return tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers))


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    hidden, heads, layers = int(full["n_embd"]), int(full["n_head"]), int(full["n_layer"])
    size = read.head_dim({}, hidden, heads)
    return BackboneShape(
        family="gpt2",
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=size,
        ffn=int(full.get("n_inner") or 4 * hidden),
        vocab=int(full["vocab_size"]),
        padded_vocab=int(full["vocab_size"]),
        max_positions=int(full["n_positions"]),
        position_limit=int(full["n_positions"]),
        position_offset=0,
        norm="LayerNorm",
        norm_eps=float(full["layer_norm_epsilon"]),
        activation=read.activation("activation_function", full["activation_function"]),
        gated=False,
        tied=bool(full.get("tie_word_embeddings", True)),
        biases={"linear_qkv": True, "linear_proj": True, "linear_fc1": True, "linear_fc2": True},
        qk_norm=False,
        rope=None,
        windows=(None,) * layers,
        scales=_scales(full, layers, size),
        eos_ids=read.token_ids(full.get("eos_token_id")),
        bos_id=full.get("bos_token_id"),
        pad_id=full.get("pad_token_id"),
        config=full,
    )


FAMILY = Family(
    model_type="gpt2",
    names=_NAMES,
    fields=Fields(
        used=frozenset(
            """
            n_embd n_head n_layer n_inner n_positions layer_norm_epsilon activation_function scale_attn_weights
            scale_attn_by_inverse_layer_idx hidden_size num_attention_heads num_hidden_layers max_position_embeddings
            """.split()
        ),
        # Upcasting the scores changes no result but rounding: attention keeps them in fp32 always.
        ignored=frozenset({"n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn"}),
    ),
    shape=_shape,
)
