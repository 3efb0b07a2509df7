"""What the public config.json files of LLMem's models say of their sizes, and how many parameters the models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_mux.memory.tensors import Skeleton

_OPT = {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}
_BLOOM = {"model_type": "bloom", "vocab_size": 250880}
_CODEGEN = {"model_type": "codegen", "vocab_size": 51200, "n_positions": 2048, "tie_word_embeddings": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": {
        **_OPT, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
        "word_embed_proj_dim": 768, "do_layer_norm_before": True,
    },
    "facebook/opt-350m": {
        **_OPT, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    },
    "facebook/opt-1.3b": {
        **_OPT, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
        "word_embed_proj_dim": 2048, "do_layer_norm_before": True,
    },
    "facebook/opt-2.7b": {
        **_OPT, "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 10240,
        "word_embed_proj_dim": 2560, "do_layer_norm_before": True,
    },
    "bigscience/bloom-560m": {**_BLOOM, "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    "bigscience/bloom-1b1": {**_BLOOM, "n_embed": 1536, "n_layer": 24, "num_attention_heads": 16},
    "bigscience/bloom-3b": {**_BLOOM, "n_embed": 2560, "n_layer": 30, "num_attention_heads": 32},
    "microsoft/BioGPT-Large": {
        "model_type": "biogpt", "vocab_size": 57717, "hidden_size": 1600, "num_hidden_layers": 48,
        "num_attention_heads": 25, "intermediate_size": 6400, "max_position_embeddings": 2048,
    },
    "Salesforce/codegen-350M-nl": {
        **_CODEGEN, "n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32, "n_inner": None,
    },
    "Salesforce/codegen-2B-nl": {
        **_CODEGEN, "n_embd": 2560, "n_layer": 32, "n_head": 32, "rotary_dim": 64, "n_inner": None,
    },
    "bigcode/gpt_bigcode-santacoder": {
        "model_type": "gpt_bigcode", "vocab_size": 49280, "n_embd": 2048, "n_layer": 24, "n_head": 16,
        "n_inner": 8192, "n_positions": 2048, "multi_query": True, "bos_token_id": 49152,
        "eos_token_id": 49152,
    },
    "EleutherAI/gpt-neo-1.3B": {
        "model_type": "gpt_neo", "vocab_size": 50257, "hidden_size": 2048, "num_layers": 24, "num_heads": 16,
        "intermediate_size": None, "max_position_embeddings": 2048, "window_size": 256,
        "attention_types": [[["global", "local"], 12]],
    },
    "llama-7b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "intermediate_size": 11008, "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

PARAMETERS = {
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-1b1": 1_065_314_304,
    "bigscience/bloom-3b": 3_002_557_440,
    "microsoft/BioGPT-Large": 1_571_188_800,
    "Salesforce/codegen-350M-nl": 356_712_448,
    "Salesforce/codegen-2B-nl": 2_779_356_160,
    "bigcode/gpt_bigcode-santacoder": 1_124_886_528,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    "llama-7b": 6_738_415_616,
}
"""Values of all parameters, tied ones once: as the model cards have it where they do."""

TABLE_3 = {
    "facebook/opt-1.3b": "4DP",
    "facebook/opt-2.7b": "4TP",
    "bigscience/bloom-1b1": "4DP",
    "bigscience/bloom-3b": "4TP",
    "microsoft/BioGPT-Large": "4DP",
    "Salesforce/codegen-2B-nl": "4TP",
    "bigcode/gpt_bigcode-santacoder": "4DP",
    "EleutherAI/gpt-neo-1.3B": "4DP",
    "llama-7b": "offload",
}
"""What LLMem selects on four GPUs of 16,384 MB, sequences of 512 tokens."""

TABLE_2 = {
    "facebook/opt-125m": (16314, 10402, 16378),
    "facebook/opt-350m": (16004, 9354, 16264),
    "bigscience/bloom-560m": (16578, 10726, 16324),
    "Salesforce/codegen-350M-nl": (16236, 6910, 16100),
}
"""MiB on one GPU at the largest batch that it holds: LLMem's and DNNMem's estimates, and what was measured."""


def skeleton(name: str, directory: Path) -> Skeleton:
    """A model of its config.json, written into a directory."""
    return Skeleton(write(directory, CONFIGS[name]))


def write(directory: Path, config: Any) -> Path:
    """A config.json in a directory."""
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    return file
