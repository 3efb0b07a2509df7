"""Gemma 3, its text models: norms around each sublayer, two rotary embeddings, windows on five layers of six.

Weights of norms are stored less one, and embeddings are multiplied by the square root of the hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone.config import Family, refuse
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.shape import BackboneShape
from megatron_mux.tensor_names import DefaultTargets

_NAMES = replace(
    like.NAMES,
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    targets=DefaultTargets(),
)


def _shape(full: Mapping[str, Any]) -> BackboneShape:
    shape = like.shape(full, _NAMES, activation_field="hidden_activation")
    scale = full["query_pre_attn_scalar"]
    if not scale > 0:
        refuse("query_pre_attn_scalar", scale, "a positive number")
    return replace(
        shape,
        norm_offset=1.0,
        embedding_scale=shape.hidden**0.5,
        scales=(scale**-0.5,) * shape.layers,
    )


FAMILY = Family(
    shape=_shape,
    used=(like.USED - {"hidden_act", "partial_rotary_factor"})
    | frozenset(
        """
        attention_bias hidden_activation layer_types query_pre_attn_scalar rope_local_base_freq sliding_window
        sliding_window_pattern _sliding_window_pattern
        """.split()
    ),
    ignored=like.IGNORED | {"cache_implementation"},
    fixed={
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
)
