"""What `memory_cells` combines: configs of backbones, adapters, divisions among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_mux.adapters.registry import KINDS
from megatron_mux.memory.forms.method import Method

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


class Size(NamedTuple):
    """Another backbone of a family, and other rows.

    Attributes:
        config: Fields that differ from `CONFIGS`.
        sequences: Of a micro-batch.
    """

    config: Mapping[str, Any]
    sequences: int


SIZES: Mapping[str, Mapping[str, Size]] = {
    "mixtral": {
        "wide": Size({"hidden_size": 1024, "intermediate_size": 1792, "num_local_experts": 4}, 6),
        "many": Size(
            {"hidden_size": 256, "intermediate_size": 320, "num_local_experts": 16, "num_experts_per_tok": 4}, 32
        ),
    },
    "qwen3_moe": {
        "wide": Size(
            {"hidden_size": 1024, "head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2,
             "moe_intermediate_size": 768, "norm_topk_prob": False}, 6,
        ),
        "many": Size({"hidden_size": 256, "num_experts": 64, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 128, "decoder_sparse_step": 2}, 32),
    },
    "deepseek_v2": {
        "wide": Size({"hidden_size": 1024, "n_routed_experts": 8, "num_experts_per_tok": 2, "v_head_dim": 96,
                      "n_shared_experts": 2}, 6),
        "many": Size({"hidden_size": 256, "n_routed_experts": 64, "num_experts_per_tok": 6, "q_lora_rank": 96,
                      "moe_intermediate_size": 128, "first_k_dense_replace": 2}, 32),
    },
    "deepseek_v3": {
        "wide": Size({"hidden_size": 1024, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1,
                      "topk_group": 1, "moe_intermediate_size": 512, "first_k_dense_replace": 0}, 6),
        "many": Size({"hidden_size": 256, "n_routed_experts": 64, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 128, "n_shared_experts": 2, "first_k_dense_replace": 2}, 32),
    },
}  # fmt: skip
"""Of families with experts."""
ON_EXPERTS, ON_SHARED, EVERYWHERE = "LORA on experts", "LORA on shared experts", "LORA everywhere"
_SHARED = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS: Mapping[str, dict[str, Any]] = {
    "LORA": {"r": 8, "target_modules": "all-linear"},
    "LORA with dropout": {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"},
    "BOTTLENECK": {"bottleneck_size": 32},
    "PREFIX_TUNING": {"num_virtual_tokens": 16},
    "DIFF_PRUNING": {"sparsity": 0.9, "target_modules": "all-linear"},
    "LORA on attention": {"r": 8},
    ON_EXPERTS: {"r": 8, "target_parameters": _EXPERTS},
    ON_SHARED: {"r": 8, "target_parameters": _SHARED, "target_modules": ["o_proj"]},
    EVERYWHERE: {"r": 8, "target_modules": "all-linear", "target_parameters": _EXPERTS},
}
"""Fields of sections that do not have defaults for all, and of those whose defaults adapt little."""
KIND_NAMES = (*KINDS, "LORA with dropout")
EXPERT_KINDS = ("LORA", "LORA on attention", ON_EXPERTS, ON_SHARED, EVERYWHERE)
"""Of families with experts; `LORA` is on everything but routed experts."""
METHODS = {
    "1x1": Method(parts=2),
    "TP2": Method(tensor=2, parts=2),
    "PP2": Method(pipeline=2, parts=8),
}
EXPERT_METHODS = {
    "1x1": Method(parts=2),
    "all computed again": Method(parts=2, recompute="full"),
    "attention computed again": Method(parts=2, recompute="selective"),
    "PP2": Method(pipeline=2, parts=8),
    "TP2": Method(tensor=2, sequence_parallel=True, parts=2),
    "TP2+EP2": Method(data=2, tensor=2, expert=2, sequence_parallel=True, parts=2),
    "EP2": Method(data=2, expert=2, parts=2),
    "EP4": Method(data=4, expert=4, parts=2),
    "EP2+PP2": Method(data=2, expert=2, pipeline=2, parts=8),
    "EP3, placed": Method(data=3, expert=3, parts=2),
}
"""Divisions of backbones with experts. `placed`: experts are selected by a skewed profile, and lie unevenly on ranks,
some on several."""
