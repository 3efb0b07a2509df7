"""What DeepSeek-V2 and V3 share: multi-head latent attention, shared and routed experts behind some dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_mux.backbone import config as read
from megatron_mux.backbone.families import _experts
from megatron_mux.backbone.families import _llama_like as like
from megatron_mux.backbone.rotary import mscale
from megatron_mux.base_ops import LATENT_OPS
from megatron_mux.expert_shape import ExpertNames, Routing
from megatron_mux.shape import BackboneShape, Latent
from megatron_mux.tensor_names import DefaultTargets, Linear, Names

USED = like.USED | frozenset(
    """
    attention_bias first_k_dense_replace kv_lora_rank q_lora_rank n_group n_routed_experts n_shared_experts num_experts
    num_local_experts num_experts_per_tok moe_intermediate_size qk_nope_head_dim qk_rope_head_dim v_head_dim
    routed_scaling_factor topk_group norm_topk_prob
    """.split()
)
IGNORED = _experts.IGNORED | frozenset(
    # The width of a head follows from others; the rest belongs to pre-training, or to how it was run.
    """
    qk_head_dim aux_loss_alpha seq_aux ep_size num_nextn_predict_layers num_mtp_layers
    """.split()
)
FIXED: dict[str, tuple[Any, ...]] = {"moe_layer_freq": (1,), "mlp_bias": (False,)}

_STORED = ExpertNames(
    router="mlp.gate",
    stored_router="mlp.gate",
    stored="mlp.experts.{}",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
)
_NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says."""


def shape(
    full: Mapping[str, Any], routing: Routing, *, interleaved: bool, wide_rotation: bool
) -> BackboneShape:
    """The shape of either family.

    Args:
        routing: How rows are routed.
        interleaved, wide_rotation: See `Latent`.

    Raises:
        UserError: A field asks for something unsupported.
    """
    plain, rotated, value = (size(full, f"{of}_head_dim") for of in ("qk_nope", "qk_rope", "v"))
    query = None if full["q_lora_rank"] is None else size(full, "q_lora_rank")
    made = like.shape({**full, "head_dim": rotated}, _names(full, query))
    if made.kv_heads != made.heads:
        read.refuse("num_key_value_heads", made.kv_heads, f"as many as num_attention_heads, {made.heads}")
    made = replace(
        made,
        head_dim=plain + rotated,
        scales=(_scale(full, plain + rotated),) * made.layers,
        latent=Latent(
            query, size(full, "kv_lora_rank"), plain, rotated, value, _NORM_EPS, interleaved, wide_rotation
        ),
        biases={
            **made.biases,
            **{op: bool(full["attention_bias"]) and op.endswith("_down") for op in LATENT_OPS},
            "linear_qkv": False,
        },
    )
    width = size(full, "moe_intermediate_size")
    first = full["first_k_dense_replace"]
    if type(first) is not int or not 0 <= first <= made.layers:
        read.refuse("first_k_dense_replace", first, f"a number from 0 to the {made.layers} layers")
    return _experts.with_experts(
        made,
        full,
        count=size(full, "n_routed_experts"),
        ffn=width,
        routing=routing,
        names=_STORED,
        dense=range(first),
        shared_ffn=width * size(full, "n_shared_experts"),
    )


def check_groups(full: Mapping[str, Any]) -> tuple[int, int]:
    """Return the groups that experts form, and how many of them a row's experts come from.

    Raises:
        UserError: They do not fit; or a row could need more experts than its groups have, which `transformers` takes
            from other groups, V2 with weights of zero.
    """
    groups, best = size(full, "n_group"), size(full, "topk_group")
    count, chosen = size(full, "n_routed_experts"), size(full, "num_experts_per_tok")
    if count % groups or best > groups:
        read.refuse("n_group", groups, f"a divisor of the {count} experts, at least topk_group")
    if chosen > best * (count // groups):
        read.refuse("topk_group", best, f"groups of {count // groups} that hold {chosen} experts together")
    return groups, best


def size(full: Mapping[str, Any], field: str) -> int:
    """A size of the config, checked."""
    value = full[field]
    if type(value) is not int or value < 1:
        read.refuse(field, value, "a positive whole number")
    return int(value)


def _scale(full: Mapping[str, Any], width: int) -> float:
    """What scores are multiplied by: stretched positions make it larger."""
    rope = full.get("rope_parameters") or {}
    weight = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else 0
    return float(width**-0.5 * (mscale(rope["factor"], weight) ** 2 if weight else 1.0))


def _names(full: Mapping[str, Any], query: int | None) -> Names:
    attention: dict[Any, tuple[Linear, ...]] = {
        "linear_kv_down": (Linear("self_attn.kv_a_proj_with_mqa", ("kv_latent",)),),
        "linear_kv_up": (Linear("self_attn.kv_b_proj", ("kv",)),),
    }
    if query is None:
        attention["linear_q"] = (Linear("self_attn.q_proj", ("q",)),)
    else:
        attention["linear_q_down"] = (Linear("self_attn.q_a_proj", ("q_latent",)),)
        attention["linear_q_up"] = (Linear("self_attn.q_b_proj", ("q",)),)
    found = _experts.names(like.NAMES)
    ops = {**found.ops, **attention}
    del ops["linear_qkv"]
    predicted = range(full["num_hidden_layers"], full["num_hidden_layers"] + _predicted(full))
    return replace(
        found,
        ops=ops,
        q_latent_norm=None if query is None else "self_attn.q_a_layernorm",
        kv_latent_norm="self_attn.kv_a_layernorm",
        # Layers that predict tokens further ahead, which fine-tuning leaves out.
        ignorable=(*found.ignorable, *(rf"model\.layers\.{layer}\..*" for layer in predicted)),
        targets=DefaultTargets(
            lora=("q_proj" if query is None else "q_b_proj", "kv_b_proj"),
            ia3=("kv_b_proj",),
            ia3_feedforward=(),
            bottleneck=("o_proj",),
        ),
    )


def _predicted(full: Mapping[str, Any]) -> int:
    return int(full.get("num_nextn_predict_layers") or full.get("num_mtp_layers") or 0)
