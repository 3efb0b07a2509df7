"""GPT-2: one fused, transposed module for q, k and v; learned positions; a scale that may depend on the layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.config import Family
from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets, Linear, Names

NAMES = Names(
    base="transformer.",
    layer="transformer.h.{}",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    input_norm="ln_1",
    mlp_norm="ln_2",
    ops={
        "linear_qkv": (Linear("attn.c_attn", ("q", "k", "v")),),
        "linear_proj": (Linear("attn.c_proj", ("out",)),),
        "linear_fc1": (Linear("mlp.c_fc", ("fc",)),),
        "linear_fc2": (Linear("mlp.c_proj", ("out",)),),
    },
    transposed=True,
    # Causal masks that old checkpoints carry.
    ignorable=(r".*\.attn\.(bias|masked_bias)",),
    targets=DefaultTargets(
        lora=("c_attn",),
        ia3=("c_attn", "mlp.c_proj"),
        ia3_feedforward=("mlp.c_proj",),
        bottleneck=("attn.c_proj", "mlp.c_proj"),
    ),
)


def _scales(full: Mapping[str, Any], layers: int, head_dim: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if full.get("scale_attn_weights", True) else 1.0
    by_layer = bool(full.get("scale_attn_by_inverse_layer_idx"))
    return tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers))


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = decoder.shape(
        full,
        NAMES,
        ffn=full["n_inner"] or 4 * full["n_embd"],
        activation_field="activation_function",
        norm="LayerNorm",
        norm_eps=full["layer_norm_epsilon"],
        biases=decoder.biases(qkv=True, proj=True, mlp=True),
    )
    return replace(shape, scales=_scales(full, shape.layers, shape.head_dim), padding_token=None)


FAMILY = Family(
    shape=_shape,
    used=decoder.USED
    | frozenset(
        """
        n_embd n_head n_layer n_inner n_positions layer_norm_epsilon activation_function scale_attn_weights
        scale_attn_by_inverse_layer_idx
        """.split()
    ),
    # Upcasting the scores changes no result but rounding: attention keeps them in fp32 always.
    # The last two stand in old checkpoints, of a double-headed model and of a cache.
    ignored=frozenset(
        """
        n_ctx resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn predict_special_tokens output_past
        """.split()
    ),
)
