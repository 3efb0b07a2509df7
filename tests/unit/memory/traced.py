"""Small configurations to trace, and a way of fine-tuning of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

on_a_fake_gpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="a fake GPU needs a process without a real one: set CUDA_VISIBLE_DEVICES= where there is one",
)
"""Traces in this very process. Machines without a GPU run them, CI among them."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 160,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
CONFIGS = {"llama": LLAMA, "gpt2": GPT2}

ADAPTERS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"peft_type": "LORA", "r": 4, "lora_dropout": 0.1},
    "ia3": {"peft_type": "IA3"},
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 5},
}
