"""What the `adapter_config.json` files of all kinds share, as peft 0.21 writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_mux.adapters.modules import ALL_LINEAR, Shape, short_names

if TYPE_CHECKING:
    from megatron_mux.adapters.kind import AdapterSpec

_PEFT_VERSION = "0.21.0"  # whose fields these are

_COMMON: Mapping[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "revision": None,
    "task_type": "CAUSAL_LM",
}


def stored_config(spec: AdapterSpec, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a kind's file, keys in order.

    Args:
        spec: The section.
        fields: Those of the kind.
    """
    config = {**_COMMON, **fields, "peft_type": spec.peft_type}
    if spec.in_peft:
        config["peft_version"] = _PEFT_VERSION
    return dict(sorted(config.items()))


def stored_targets(spec: AdapterSpec, shape: Shape) -> str | list[str]:
    """`target_modules` as peft stores them: `all-linear` spelled out, a regular expression as it is."""
    targets = spec.targets(shape)
    if not isinstance(targets, str):
        return list(targets)
    return short_names(shape.module_paths) if targets.lower() == ALL_LINEAR else targets
