"""The content of `adapter_config.json`, as peft 0.21 writes it; for methods that peft lacks, our own in its manner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_mux.adapters.targets import (
    ALL_LINEAR,
    Sizes,
    match_feedforward,
    match_targets,
    short_names,
)

_PEFT_VERSION = "0.21.0"  # whose fields these are

_COMMON: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "revision": None,
    "task_type": "CAUSAL_LM",
}

# Fields of peft's LoraConfig that we leave at their defaults.
_LORA_REST: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "qalora_group_size": 16,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}


def lora_config(
    spec: Any, targets: str | Sequence[str], sizes: Sizes, paths: Sequence[str]
) -> dict[str, Any]:
    """peft's `LoraConfig`.

    Args:
        spec: The `adapter` section.
        targets: Its targets.
        sizes: Of the backbone.
        paths: Of all modules of the backbone.
    """
    return _sorted(
        _COMMON
        | _LORA_REST
        | {
            "peft_type": "LORA",
            "peft_version": _PEFT_VERSION,
            "r": spec.r,
            "lora_alpha": spec.lora_alpha,
            "lora_dropout": spec.lora_dropout,
            "use_rslora": spec.use_rslora,
            "fan_in_fan_out": sizes.transposed,
            "target_modules": _names(targets, paths),
        }
    )


def ia3_config(
    targets: str | Sequence[str], feedforward: str | Sequence[str], sizes: Sizes, paths: Sequence[str]
) -> dict[str, Any]:
    """peft's `IA3Config`. Arguments as for `lora_config`; `feedforward` are the modules whose input is scaled."""
    names: str | list[str] = _names(targets, paths)
    inputs = list(feedforward) if not isinstance(feedforward, str) else feedforward
    if isinstance(names, str) or isinstance(inputs, str) or not set(inputs) <= set(names):
        # peft wants the one to be a subset of the other, name by name: full paths always are.
        names = match_targets(targets, paths)
        inputs = match_feedforward(feedforward, names)
    return _sorted(
        _COMMON
        | {
            "peft_type": "IA3",
            "peft_version": _PEFT_VERSION,
            "exclude_modules": None,
            "fan_in_fan_out": sizes.transposed,
            "feedforward_modules": inputs,
            "init_ia3_weights": True,
            "modules_to_save": None,
            "target_modules": names,
        }
    )


def prefix_config(spec: Any, sizes: Sizes) -> dict[str, Any]:
    """peft's `PrefixTuningConfig`; peft counts key-value heads where it says attention heads.

    Args:
        spec: The `adapter` section.
        sizes: Of the backbone.
    """
    width = sizes.kv_heads * sizes.head_dim
    return _sorted(
        _COMMON
        | {
            "peft_type": "PREFIX_TUNING",
            "peft_version": _PEFT_VERSION,
            "encoder_hidden_size": width,
            "init_weights": None,
            "modules_to_save": None,
            "num_attention_heads": sizes.kv_heads,
            "num_layers": sizes.layers,
            "num_transformer_submodules": 1,
            "num_virtual_tokens": spec.num_virtual_tokens,
            "prefix_projection": False,
            "token_dim": width,
        }
    )


def own_config(
    peft_type: str, fields: dict[str, Any], targets: str | Sequence[str], paths: Sequence[str]
) -> dict[str, Any]:
    """The config of a method that peft lacks.

    Args:
        peft_type: Its name in tasks.yaml.
        fields: Its fields there, targets apart.
        targets: Its targets.
        paths: Of all modules of the backbone.
    """
    return _sorted(_COMMON | fields | {"peft_type": peft_type, "target_modules": _names(targets, paths)})


def _names(targets: str | Sequence[str], paths: Sequence[str]) -> str | list[str]:
    """Targets as peft stores them: `all-linear` spelled out, a regular expression as it is."""
    if not isinstance(targets, str):
        return list(targets)
    return short_names(paths) if targets.lower() == ALL_LINEAR else targets


def _sorted(config: dict[str, Any]) -> dict[str, Any]:
    return dict(sorted(config.items()))
