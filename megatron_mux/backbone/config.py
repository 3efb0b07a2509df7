"""Reading config.json: every field is used, known to have no effect, checked, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from megatron_mux.errors import UserError
from megatron_mux.kernels.pointwise.reference import ACTIVATIONS
from megatron_mux.shape import BackboneShape


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face checkpoints: one file in `families/` each, which says all that is particular to it.

    Attributes:
        shape: Reads the config (defaults filled in); raises `UserError` by `refuse`.
        used: Fields that `shape` reads. A field named nowhere is refused unless it is empty.
        ignored: Fields without effect on what we compute (dropout of the backbone, caching, other heads).
        fixed: Fields that must have one of the values given.
    """

    shape: Callable[[Mapping[str, Any]], BackboneShape]
    used: frozenset[str]
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_IGNORED = frozenset(
    # How the checkpoint was made, options of sampling and of other heads; quantisation is read by `registry`.
    """
    _name_or_path _num_labels num_labels _attn_implementation architectures attn_implementation auto_map bos_token_id
    chunk_size_feed_forward classifier_dropout dtype eos_token_id finetuning_task gradient_checkpointing id2label
    initializer_range is_llama_config label2id model_type output_attentions output_hidden_states pad_token_id prefix
    pretraining_tp problem_type return_dict summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache vocab_size tie_word_embeddings
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_scores remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens
    temperature tf_legacy_loss top_k top_p typical_p
    quantization_config compression_config
    """.split()
)
_FIXED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    # transformers lets tokens attend to later ones for any other value, null included.
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "rope_interleaved": (False,),
}

_SIZES = frozenset(
    """
    hidden_size n_embd num_hidden_layers n_layer num_layers num_attention_heads n_head num_heads num_key_value_heads
    head_dim intermediate_size ffn_dim n_inner vocab_size max_position_embeddings n_positions window_size
    """.split()
)
# Null has a meaning for these: as many as there are heads, or a width that follows from the others.
_SIZES_OR_NULL = frozenset({"num_key_value_heads", "head_dim", "intermediate_size", "n_inner"})


def refuse(field: str, value: Any, supported: str) -> NoReturn:
    """Refuse a config by the name of the field that asks for something unsupported.

    Raises:
        UserError: Always.
    """
    raise UserError(problem(field, value, supported))


def problem(field: str, value: Any, supported: str) -> str:
    """The message that refuses a field."""
    return f"The backbone's config.json asks for {field} = {json.dumps(value, default=str)}: supported is {supported}."


def complete(family: Family, raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Fill in the family's defaults as transformers does and check every field.

    Args:
        family: The family of `raw["model_type"]`.
        path: Of config.json, for messages.

    Returns:
        All fields.

    Raises:
        UserError: Lists every field that asks for something unsupported.
    """
    from transformers import CONFIG_MAPPING

    kind = raw["model_type"]
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(raw))
        full: dict[str, Any] = config.to_dict()
        # Some names are stored under another one (GPT-2's n_embd); both may be asked for.
        full |= {name: getattr(config, name) for name in config.attribute_map}
    except Exception as error:  # transformers lets its validators raise anything
        raise UserError(f"{path} is not a valid {kind} config: {error}.") from None
    problems = _problems(family, {**raw, **full}, raw)
    if problems:
        raise UserError(*problems)
    return full


def _problems(family: Family, full: Mapping[str, Any], raw: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, allowed in {**_FIXED, **family.fixed}.items():
        if name in full and full[name] not in allowed:
            problems.append(problem(name, full[name], " or ".join(json.dumps(v) for v in allowed)))
    for name in _SIZES & full.keys():
        required = name in family.used - _SIZES_OR_NULL
        if (required or full[name] is not None) and not _is_size(full[name]):
            problems.append(problem(name, full[name], "a positive whole number"))
    known = _IGNORED | family.used | family.ignored | set(family.fixed) | set(_FIXED)
    for name, value in raw.items():
        if name not in known and value not in (None, False, "", [], {}):
            problems.append(
                f"The backbone's config.json has {name} = {json.dumps(value, default=str)}, which is not known for "
                f"model_type {raw['model_type']}: if it changes nothing that is computed, remove it."
            )
    return problems


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def activation(field: str, value: Any) -> str:
    """Check the name of an activation function."""
    if value not in ACTIVATIONS:
        refuse(field, value, ", ".join(ACTIVATIONS))
    return str(value)


def head_dim(full: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Width of a head: the config's, or the hidden size divided by the number of heads."""
    if full.get("head_dim"):
        return int(full["head_dim"])
    if hidden % heads:
        refuse("num_attention_heads", heads, f"a divisor of hidden_size {hidden}, or a head_dim")
    return hidden // heads


def divisible_heads(heads: int, kv_heads: int) -> None:
    """Check that the number of key-value heads divides the number of heads."""
    if kv_heads < 1 or heads % kv_heads:
        refuse("num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")


def layer_types(full: Mapping[str, Any], layers: int) -> list[str]:
    """`layer_types`: which layers attend to everything and which within a window; everything if it is empty."""
    types = list(full.get("layer_types") or ["full_attention"] * layers)
    if set(types) - {"full_attention", "sliding_attention"} or len(types) != layers:
        refuse("layer_types", types, f"full_attention or sliding_attention for each of {layers} layers")
    return types


def windows(full: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """For each layer, how many of the latest positions a token sees, itself included; None for all.

    Args:
        full: The config. Some say apart whether the window is used (Qwen2, Qwen3), some which layers have one.
    """
    size = full.get("sliding_window") if full.get("use_sliding_window", True) else None
    if size is not None and not _is_size(size):
        refuse("sliding_window", size, "a positive whole number or null")
    if not full.get("layer_types"):
        return (size,) * layers
    types = layer_types(full, layers)
    if size is None and "sliding_attention" in types:
        refuse("layer_types", types, "sliding_attention only with a sliding_window that is used")
    return tuple(size if kind == "sliding_attention" else None for kind in types)
