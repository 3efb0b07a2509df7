"""Megatron's command line, as its checkpoints keep it, and the Hugging Face config of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.kernels.pointwise.reference import ACTIVATIONS
from megatron_mux.shape import BackboneShape

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (),
    "qk_l2_norm": (False,),
    "no_rope_freq": (),
    "softmax_type": ("vanilla",),
    "softmax_scale": (),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (),
    "linear_attention_freq": (),
    "window_attn_skip_freq": (),
    "use_mup": (False,),
    "spec": (),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "mtp_num_layers": (0,),
    "moe_shared_expert_intermediate_size": (0,),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_num_groups": (1,),
    "moe_latent_size": (),
}
"""Arguments that change what is computed: values that are supported, besides none at all."""

# What a table of arguments cannot say, and what follows from the rest.
_DERIVED = frozenset(
    {"family", "names", "config", "padding_token", "padded_vocab", "max_positions", "quantisation"}
)


def to_config(arguments: Mapping[str, Any], rows: int, dtype: str) -> dict[str, Any]:
    """The Hugging Face config of a model that was trained with these arguments.

    Args:
        arguments: Megatron's.
        rows: Of the embedding.
        dtype: Of the embedding, as a config names it.

    Raises:
        UserError: No supported family computes the same; names the argument.
    """

    def get(name: str, default: Any = None) -> Any:
        value = arguments.get(name)
        return default if value is None else value

    for name, supported in _ONLY.items():
        if arguments.get(name) not in (None, *supported):
            raise _refusal(name, arguments[name], " or ".join(map(str, supported)) or "none")
    heads, hidden, layers = get("num_attention_heads"), get("hidden_size"), get("num_layers")
    config = {
        "vocab_size": _vocabulary(arguments, rows),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": get("max_position_embeddings"),
        "tie_word_embeddings": not get("untie_embeddings_and_output_weights", False),
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if get("normalization", "LayerNorm") == "LayerNorm":
        return config | _gpt2(arguments)
    wanted = {"position_embedding_type": "rope", "swiglu": True}
    for name, value in wanted.items():
        if arguments.get(name) != value:
            raise _refusal(name, arguments.get(name), f"{value} with RMSNorm")
    config |= {
        "num_key_value_heads": get("num_query_groups") if get("group_query_attention", False) else heads,
        "head_dim": get("kv_channels", hidden // heads),
        "intermediate_size": get("ffn_hidden_size"),
        "hidden_act": "silu",
        "rms_norm_eps": get("norm_epsilon", 1e-5),
        "rope_parameters": _rope(arguments),
    }
    return config | _llama_like(arguments, layers)


def _refusal(name: str, value: Any, supported: str) -> UserError:
    return UserError(f"Megatron's argument {name} = {value}: supported is {supported}.")


def _vocabulary(arguments: Mapping[str, Any], rows: int) -> int:
    """Tokens: as many as the command line says; else all rows, the padding too, as Megatron computes."""
    known = arguments.get("vocab_size")
    # The number of a NullTokenizer leaves out the end of documents in some versions.
    if not known or arguments.get("tokenizer_type") == "NullTokenizer":
        return rows
    return min(int(known), rows)


def _gpt2(arguments: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = arguments["num_attention_heads"], arguments["hidden_size"]
    wanted = {
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "add_bias_linear": True,
        "qk_layernorm": False,
        "group_query_attention": False,
        "kv_channels": hidden // heads,
        "num_experts": None,
        "window_size": None,
    }
    defaults = {"position_embedding_type": "learned_absolute", "add_bias_linear": True}
    for name, value in wanted.items():
        held = arguments.get(name, defaults.get(name))
        if held is not None and held != value:
            raise _refusal(name, held, f"{value} with LayerNorm")
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_inner": arguments.get("ffn_hidden_size"),
        # Megatron's fused kernel of bias and GELU approximates it.
        "activation_function": "gelu_new" if arguments.get("bias_gelu_fusion", True) else "gelu",
        "layer_norm_epsilon": arguments.get("norm_epsilon", 1e-5),
    }


def _rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(arguments.get("rotary_base") or 10000),
    }
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if arguments.get("use_rope_scaling"):
        if factor not in (None, 1):
            raise _refusal("rotary_seq_len_interpolation_factor", factor, "none with use_rope_scaling")
        # The last three are fixed in Megatron.
        rope |= {"rope_type": "llama3", "factor": float(arguments.get("rope_scaling_factor") or 8.0)}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif factor not in (None, 1):
        rope |= {"rope_type": "linear", "factor": float(factor)}
    return rope


def _llama_like(arguments: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The family of a model with RMS norms, rotary positions and SwiGLU, and the fields that the family has."""
    biases, qkv_bias = bool(arguments.get("add_bias_linear")), bool(arguments.get("add_qkv_bias"))
    qk_norm, experts = bool(arguments.get("qk_layernorm")), arguments.get("num_experts")
    window = arguments.get("window_size")
    if qk_norm or experts or window:
        feature = "qk_layernorm" if qk_norm else "num_experts" if experts else "window_size"
        for name, value in (("add_bias_linear", biases), ("add_qkv_bias", qkv_bias)):
            if value:
                raise _refusal(name, value, f"False with {feature}")
    if window and qk_norm:
        raise _refusal("window_size", window, "none with qk_layernorm")
    sliding: dict[str, int | None] = {"sliding_window": int(next(iter(window))) + 1} if window else {}
    if experts:
        return _experts(arguments, layers, qk_norm) | (
            sliding or ({} if qk_norm else {"sliding_window": None})
        )
    if qk_norm:
        return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    if qkv_bias and not biases:
        return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    if window:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **sliding}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": biases,
        "mlp_bias": biases,
    }


def _experts(arguments: Mapping[str, Any], layers: int, qk_norm: bool) -> dict[str, Any]:
    count, ffn = arguments["num_experts"], arguments.get("ffn_hidden_size")
    width, top_k = arguments.get("moe_ffn_hidden_size") or ffn, arguments.get("moe_router_topk", 2)
    frequency = arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(layers)]
    dense = [layer for layer, has_experts in enumerate(frequency) if not has_experts]
    normalised = not arguments.get("moe_router_pre_softmax", False)
    if qk_norm:
        return {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": count,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": width,
            "norm_topk_prob": normalised,
            "mlp_only_layers": dense,
        }
    if dense:
        raise _refusal("moe_layer_freq", arguments["moe_layer_freq"], "1 without qk_layernorm")
    if not normalised:
        raise _refusal("moe_router_pre_softmax", True, "False without qk_layernorm")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": width,
        "num_local_experts": count,
        "num_experts_per_tok": top_k,
    }


def to_arguments(shape: BackboneShape, dtype: str) -> dict[str, Any]:
    """What Megatron's command line would be for a model.

    Args:
        dtype: Of its weights, as a config names it.

    Returns:
        What `--use-checkpoint-args` and checks of Megatron read.
    """
    window, experts = shape.windows[0], shape.experts
    arguments: dict[str, Any] = {
        **_positions(shape),
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.kv_heads != shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "seq_length": shape.max_positions,
        "max_position_embeddings": shape.max_positions,
        "normalization": shape.norm,
        "norm_epsilon": shape.norm_eps,
        "apply_layernorm_1p": False,
        "qk_layernorm": shape.qk_norm,
        "swiglu": shape.gated,
        "squared_relu": False,
        "bias_gelu_fusion": ACTIVATIONS[shape.activation] is ACTIVATIONS["gelu_new"],
        "add_bias_linear": shape.biases["linear_fc1"],
        "add_qkv_bias": shape.biases["linear_qkv"],
        "untie_embeddings_and_output_weights": not shape.tied,
        "window_size": None if window is None else (window - 1, 0),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": shape.vocab,
        "padded_vocab_size": None,
        "tokenizer_type": "HuggingFaceTokenizer",
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "num_experts": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "no_save_optim": True,
        "no_save_rng": True,
    }
    if experts is not None:
        dense = [int(shape.has_experts(layer)) for layer in range(shape.layers)]
        arguments |= {
            "num_experts": experts.count,
            "moe_ffn_hidden_size": experts.ffn,
            "moe_router_topk": experts.routing.top_k,
            "moe_router_pre_softmax": not experts.routing.normalised,
            "moe_layer_freq": 1 if all(dense) else dense,
            "moe_grouped_gemm": False,
        }
    return arguments


def _positions(shape: BackboneShape) -> dict[str, Any]:
    """The arguments that say how positions enter attention."""
    rope = shape.ropes[0]
    kind = None if rope is None else rope.rope_type
    return {
        "position_embedding_type": "learned_absolute" if rope is None else "rope",
        "add_position_embedding": rope is None,
        "use_rotary_position_embeddings": rope is not None,
        "rotary_base": 10000 if rope is None else _whole(rope.rope_theta),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": rope.factor if rope and kind == "linear" else None,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": rope.factor if rope and kind == "llama3" else 8.0,
    }


def _whole(value: float) -> float | int:
    """Megatron's rotary base is a whole number."""
    return int(value) if value == int(value) else value


def differences(shape: BackboneShape, described: BackboneShape) -> list[str]:
    """The properties in which a model differs from what `to_arguments` says of it; none: Megatron computes the same."""
    found = []
    for name in (field.name for field in fields(BackboneShape) if field.name not in _DERIVED):
        ours, theirs = getattr(shape, name), getattr(described, name)
        if name == "activation":
            ours, theirs = ACTIVATIONS[ours], ACTIVATIONS[theirs]
        elif name == "experts" and None not in (ours, theirs):
            ours, theirs = ((e.count, e.ffn, e.shared_ffn, e.routing, e.dense) for e in (ours, theirs))
        if ours != theirs:
            found.append(name)
    return found
