"""One GGUF file into a Hugging Face directory: fp32 weights, configuration, tokenizer.

Reads the Llama architecture with a byte-level BPE tokenizer, which is what the quickstart's SmolLM2-135M is.
Quantised tensors are dequantised; llama.cpp's reordering of the query and key rows for its rotary kernel is
undone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray

# GGUF tensor name within a block -> Hugging Face name within a layer.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def hugging_face_name(name: str) -> str:
    """`blk.7.attn_q.weight` -> `model.layers.7.self_attn.q_proj.weight`.

    Raises:
        ValueError: A tensor that this reader does not know.
    """
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in TOP_NAMES:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    raise ValueError(f"the GGUF file holds a tensor that is not known here: {name}")


def undo_rotary_order(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of each head back from llama.cpp's interleaved pairs to Hugging Face's two halves.

    Args:
        weight: `[heads * D, H]`.
        heads: Query heads for the query projection, KV heads for the key projection.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def read_weights(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor under its Hugging Face name, in fp32."""
    weights = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = undo_rotary_order(value, heads if "q_proj" in name else kv_heads)
        weights[name] = np.ascontiguousarray(value)
    return weights


def model_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """`config.json` of a `LlamaForCausalLM`."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.3g}"),  # stored as fp32
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "vocab_size": fields["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
        "use_cache": True,
    }


def tokenizer_files(fields: dict[str, Any]) -> dict[str, Any]:
    """`tokenizer.json` and `tokenizer_config.json` of a byte-level BPE that splits digits ("smollm" in GGUF).

    Raises:
        ValueError: The file's tokenizer is of another kind.
    """
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF file has a tokenizer of a kind that is not known here: {kind}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": tokens[i], **plain} for i, t in enumerate(types) if t == CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        **special,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def convert(source: Path, target: Path) -> None:
    """Write a Hugging Face directory for a GGUF file.

    Args:
        source: The `.gguf` file.
        target: An empty directory to fill.

    Raises:
        ValueError: Another architecture, tokenizer or tensor than the ones this reader knows.
    """
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ValueError(f"{source.name} is of architecture {fields.get('general.architecture')}, not llama")
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    weights = read_weights(reader, heads, kv_heads)
    config = model_config(fields, tied="lm_head.weight" not in weights)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {"config.json": config, "generation_config.json": ids, **tokenizer_files(fields)}
    for name, content in files.items():
        (target / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)  # readable by whoever can read the rest
