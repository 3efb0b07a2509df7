"""What public config.json files say of models' sizes, and how many parameters the models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_mux.memory.tensors import Skeleton

_OPT = {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}
_BLOOM = {"model_type": "bloom", "vocab_size": 250880}
_CODEGEN = {"model_type": "codegen", "vocab_size": 51200, "n_positions": 2048, "tie_word_embeddings": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/opt-350m": {
        **_OPT, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
        "word_embed_proj_dim": 512, "do_layer_norm_before": False,
    },
    "facebook/opt-1.3b": {
        **_OPT, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
        "word_embed_proj_dim": 2048, "do_layer_norm_before": True,
    },
    "bigscience/bloom-560m": {**_BLOOM, "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    "Salesforce/codegen-350M-nl": {
        **_CODEGEN, "n_embd": 1024, "n_layer": 20, "n_head": 16, "rotary_dim": 32, "n_inner": None,
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
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "bigscience/bloom-560m": 559_214_592,
    "Salesforce/codegen-350M-nl": 356_712_448,
    "bigcode/gpt_bigcode-santacoder": 1_124_886_528,
    "EleutherAI/gpt-neo-1.3B": 1_315_575_808,
    "llama-7b": 6_738_415_616,
}
"""Values of all parameters, tied ones once: as the model cards have it where they do."""


def skeleton(name: str, directory: Path) -> Skeleton:
    """A model of its config.json, written into a directory."""
    return Skeleton(write(directory, CONFIGS[name]))


def write(directory: Path, config: Any) -> Path:
    """A config.json in a directory."""
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    return file
