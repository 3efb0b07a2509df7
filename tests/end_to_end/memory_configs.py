"""Configs of small backbones of every family, and adapters, for comparisons of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LLAMA: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **LLAMA, "vocab_size": 512, "num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 4096, "n_positions": 2048, "n_embd": 512, "n_layer": 4, "n_head": 8},
    "gpt_neo": {
        "vocab_size": 4096, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "max_position_embeddings": 2048,
        "attention_types": [[["global", "local"], 2]], "window_size": 64,
    },
    "opt": {
        "vocab_size": 4096, "hidden_size": 512, "word_embed_proj_dim": 512, "ffn_dim": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 8, "max_position_embeddings": 2048,
    },
    "qwen3": {**LLAMA, "head_dim": 64},
    "gemma3_text": {**LLAMA, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 64},
    "phi3": {**LLAMA, "pad_token_id": 0},
    "mixtral": {
        **LLAMA, "vocab_size": 512, "intermediate_size": 704, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        **LLAMA, "vocab_size": 512, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **_DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "topk_method": "greedy",
    },
    "deepseek_v3": {
        **_DEEPSEEK, "q_lora_rank": 192, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
}  # fmt: skip
"""Configs of families that are not as Llama is."""

ON_EXPERTS, ON_SHARED, EVERYWHERE = "LORA on experts", "LORA on shared experts", "LORA everywhere"
_SHARED = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: Mapping[str, dict[str, Any]] = {
    ON_EXPERTS: {"r": 8, "target_parameters": _EXPERTS},
    ON_SHARED: {"r": 8, "target_parameters": _SHARED, "target_modules": ["o_proj"]},
    EVERYWHERE: {"r": 8, "target_modules": "all-linear", "target_parameters": _EXPERTS},
}
"""Fields of sections for models with experts."""
