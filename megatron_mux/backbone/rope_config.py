"""Reading the rotary settings of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_mux.backbone.config import layer_types, refuse
from megatron_mux.backbone.shape import Rope

_FIELDS = {
    "rope_theta": "theta",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "attention_factor": "attention_factor",
}
_LISTS = frozenset({"short_factor", "long_factor"})
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {"longrope": ("factor", "attention_factor")}
_COMMON = (
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def ropes_by_layer(
    full: Mapping[str, Any], head_dim: int, layers: int, partial: bool = False
) -> tuple[Rope, ...]:
    """The rotary embedding of each layer: one for all, or one for each of `layer_types`. Arguments as for `rope`."""
    if "full_attention" not in (full.get("rope_parameters") or {}):
        return (rope(full, head_dim, partial=partial),) * layers
    types = layer_types(full, layers)
    found = {kind: rope(full, head_dim, kind, partial) for kind in set(types)}
    return tuple(found[kind] for kind in types)


def rope(
    full: Mapping[str, Any], head_dim: int, layer_type: str | None = None, partial: bool = False
) -> Rope:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    Args:
        full: The config.
        head_dim: Width of a head.
        layer_type: Which of the settings, where layers of different types have their own.
        partial: Whether the family can rotate a part of a head's features only.
    """
    field, found = "rope_parameters", full.get("rope_parameters")
    if found and layer_type is not None:
        found = found.get(layer_type)
    if not found:
        field, scaling = "rope_scaling", full.get("rope_scaling") or {}
        found = {"rope_theta": full.get("rope_theta", 10000.0), **scaling}
    kind = found.get("rope_type", found.get("type", "default"))
    share = found.get("partial_rotary_factor") or full.get("partial_rotary_factor") or 1.0
    width = _rotated_width(share, head_dim, partial)
    keys = _KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        refuse(field, found, "rope_type default, linear, llama3 or longrope")
    optional = [name for name in _OPTIONAL.get(kind, ()) if found.get(name) is not None]
    extra = sorted(
        name for name in found if name not in {*_COMMON, *keys, *optional} and found[name] is not None
    )
    missing = [name for name in keys if found.get(name) is None]
    if extra or missing:
        said = f"{', '.join(extra)} unknown" if extra else f"{', '.join(missing)} missing"
        refuse(field, found, f"for rope_type {kind}: {', '.join(keys) or 'rope_theta alone'} ({said})")
    values = {
        "rope_theta": found.get("rope_theta", 10000.0),
        **{name: found[name] for name in (*keys, *optional)},
    }
    wrong = [name for name, value in values.items() if not _is_valid(name, value, width // 2)]
    if wrong:
        several = f", {width // 2} of them for " if _LISTS & set(wrong) else " for "
        refuse(field, found, f"a positive number{several}{', '.join(values)}")
    if kind == "longrope":
        values = _with_attention_factor(values, full)
    settings: dict[str, Any] = {
        _FIELDS[name]: tuple(map(float, value)) if name in _LISTS else value for name, value in values.items()
    }
    return Rope(**{**settings, "theta": float(settings["theta"])}, kind=kind, rotated_share=float(share))


def _rotated_width(share: Any, head_dim: int, partial: bool) -> int:
    """How many features of a head are rotated, an even number."""
    if not partial and share != 1.0:
        refuse("partial_rotary_factor", share, "1.0")
    if type(share) not in (int, float) or not 0 < share <= 1 or int(head_dim * share) % 2:
        refuse("partial_rotary_factor", share, f"a part of head_dim {head_dim} that is an even number")
    return int(head_dim * share)


def _is_valid(name: str, value: Any, count: int) -> bool:
    numbers = value if name in _LISTS else [value]
    if not isinstance(numbers, (list, tuple)) or (name in _LISTS and len(numbers) != count):
        return False
    return all(type(number) in (int, float) and number > 0 for number in numbers)


def _with_attention_factor(values: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """LongRoPE's factor on cosines and sines, by how much longer sequences have become, where none is given."""
    original = values["original_max_position_embeddings"]
    times = values.get("factor", full["max_position_embeddings"] / original)
    default = math.sqrt(1 + math.log(times) / math.log(original)) if times > 1 else 1.0
    found = {name: value for name, value in values.items() if name != "factor"}
    return {"attention_factor": default, **found}
