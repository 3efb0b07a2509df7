"""GPT-Neo: GPT-2 with unscaled attention, every other layer over a local window, no bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.config import Family, refuse
from megatron_mux.backbone.families import _decoder as decoder
from megatron_mux.backbone.families import gpt2
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets, Linear

_NAMES = replace(
    gpt2.NAMES,
    ops={
        **gpt2.NAMES.ops,
        "linear_qkv": decoder.separate_qkv("attn.attention"),
        "linear_proj": (Linear("attn.attention.out_proj", ("out",)),),
    },
    transposed=False,
    # Causal masks that old checkpoints carry.
    ignorable=(r".*\.attn\.attention\.(bias|masked_bias)",),
    targets=DefaultTargets(
        ia3=("q_proj", "v_proj", "c_proj"), ia3_feedforward=("c_proj",), bottleneck=("out_proj", "c_proj")
    ),
)


def _windows(full: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """`attention_types` counts out kinds of layers: [[["global", "local"], 12]]."""
    try:
        kinds = [kind for group, times in full["attention_types"] for _ in range(times) for kind in group]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or set(kinds) - {"global", "local"}:
        refuse("attention_types", full.get("attention_types"), f"global and local for {layers} layers")
    # Checkpoints carry the list counted out as well, and transformers computes by it where the two differ.
    if full["attention_layers"] != kinds:
        refuse("attention_layers", full["attention_layers"], f"what attention_types says: {', '.join(kinds)}")
    return tuple(int(full["window_size"]) if kind == "local" else None for kind in kinds)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = decoder.shape(
        full,
        _NAMES,
        ffn=full["intermediate_size"] or 4 * full["hidden_size"],
        activation_field="activation_function",
        norm="LayerNorm",
        norm_eps=full["layer_norm_epsilon"],
        biases=decoder.biases(qkv=False, proj=True, mlp=True),
    )
    windows = _windows(full, shape.layers)
    return replace(shape, windows=windows, scales=(1.0,) * shape.layers, padding_token=None)


FAMILY = Family(
    shape=_shape,
    used=decoder.USED
    | frozenset(
        """
        num_layers num_heads intermediate_size layer_norm_epsilon window_size activation_function attention_types
        attention_layers
        """.split()
    ),
    ignored=frozenset({"resid_dropout", "embed_dropout", "attention_dropout"}),
)
