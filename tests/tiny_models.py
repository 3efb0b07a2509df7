"""Small random Hugging Face models of every family, saved as a user's checkpoint would be.

`make(directory, name)` builds the model `name` and returns its path; `NAMES` lists them. Sizes are chosen so that every
family can be divided among 2 tensor ranks and 2 stages, and so that nothing is equal by accident.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA3: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
_STARCODER2: dict[str, Any] = {
    **_LLAMA,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    # Of the published configs, which transformers does not read:
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "attention_softmax_in_fp32": True,
    "scale_attention_softmax_in_fp32": True,
}
_GPT2: dict[str, Any] = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_NEO: dict[str, Any] = {
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PHI3: dict[str, Any] = {
    **_LLAMA,
    "pad_token_id": 0,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
}
_MIXTRAL: dict[str, Any] = {**_LLAMA, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}
_QWEN3_MOE: dict[str, Any] = {
    **_LLAMA,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
_DEEPSEEK: dict[str, Any] = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GROUPS = {"n_group": 4, "topk_group": 2, "q_lora_rank": 18, "rope_parameters": _YARN}
_OPT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "ffn_dim": 56,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "llama-tied": ("llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama-odd-vocab": ("llama", {**_LLAMA, "vocab_size": 97, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {**_LLAMA, "num_key_value_heads": 1}),
    "llama-biases": (
        "llama",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3},
    ),
    "llama-linear-rope": (
        "llama",
        {**_LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "llama-five-layers": ("llama", {**_LLAMA, "num_hidden_layers": 5}),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 5, "head_dim": 16}),
    "qwen2": (
        "qwen2",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "vocab_size": 99},
    ),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "gemma3_text": ("gemma3_text", _GEMMA3),
    "gemma3_text-linear-rope": (
        "gemma3_text",
        {**_GEMMA3, "rope_parameters": _GEMMA3_ROPES, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "gpt2": ("gpt2", {**_GPT2, "vocab_size": 97}),
    "gpt2-scaled": (
        "gpt2",
        {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ),
    "gpt_neo": ("gpt_neo", _NEO),
    "opt": ("opt", _OPT),
    "phi3": ("phi3", _PHI3),
    "phi3-longrope": (
        "phi3",
        {**_PHI3, "original_max_position_embeddings": 10, "rope_parameters": _LONGROPE},
    ),
    "starcoder2": ("starcoder2", _STARCODER2),
    "starcoder2-no-bias": ("starcoder2", {**_LLAMA, "use_bias": False, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", _MIXTRAL),
    "qwen3_moe": ("qwen3_moe", _QWEN3_MOE),
    "qwen3_moe-some": ("qwen3_moe", {**_QWEN3_MOE, "decoder_sparse_step": 2, "norm_topk_prob": False}),
    "llama-yarn": ("llama", {**_LLAMA, "rope_parameters": {**_YARN, "truncate": False, "mscale": None}}),
    "deepseek_v2": ("deepseek_v2", _DEEPSEEK),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {**_DEEPSEEK, **_GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v3": ("deepseek_v3", {**_DEEPSEEK, **_GROUPS, "v_head_dim": 16}),
    "deepseek_v3-one-group": (
        "deepseek_v3",
        {**_DEEPSEEK, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False},
    ),
    "opt-no-bias": ("opt", {**_OPT, "enable_bias": False, "activation_function": "gelu"}),
}
NAMES = tuple(_MODELS)
_KINDS_WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
WITH_EXPERTS = tuple(name for name, (kind, _) in _MODELS.items() if kind in _KINDS_WITH_EXPERTS)


def config(name: str, **changes: Any) -> Any:
    """The transformers config of the model `name`, with some fields replaced."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, fields = _MODELS[name]
    return CONFIG_MAPPING[kind](**{**fields, **changes})


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model, fp32, in evaluation mode, every parameter random (norms and biases too)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **changes), dtype=torch.float32)
    middle = 0.0 if "gemma" in model.config.model_type else 1.0  # Gemma stores weights of norms less one
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            is_norm = "norm" in parameter_name or "ln_" in parameter_name
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.copy_(
                    noise * 0.2 + (middle if is_norm and parameter_name.endswith("weight") else 0.0)
                )
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.eval()


def make(directory: Path, name: str, sharded: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Save the model `name` under `directory`.

    Args:
        directory: Where; made if missing.
        name: One of `NAMES`.
        sharded: In several safetensors files with an index.
        seed: Of its weights.
        changes: Config fields to replace.

    Returns:
        The checkpoint's directory.
    """
    path = Path(directory) / (name + "-sharded" * sharded)
    model = build(name, seed, **changes)
    model.save_pretrained(path, safe_serialization=True, max_shard_size="20KB" if sharded else "1GB")
    return path


def words(directory: Path) -> Path:
    """Put a tokenizer of three tokens into a directory, made if missing, and return it."""
    from tokenizers import Tokenizer, models

    directory.mkdir(exist_ok=True)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    Tokenizer(models.WordLevel(vocabulary, "<unk>")).save(str(directory / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return directory
