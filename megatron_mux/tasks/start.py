"""Starting from an existing PEFT adapter: its stored config becomes part of the task's `adapter` section."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mux.tasks.adapters import ADAPTERS
from megatron_mux.tasks.wording import shown

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# How fresh weights would have been drawn, which no longer matters; other values change the backbone itself.
_HARMLESS_INITIAL: Mapping[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "init_ia3_weights": (True, False),
    "init_weights": (None, "zero"),
}
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})


def with_stored_config(adapter: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], list[str]]:
    """Complete an `adapter` mapping from the config of the adapter it starts from.

    Args:
        adapter: The section as the user wrote it.
        base: Directory that relative paths start from.

    Returns:
        The completed section, and what is wrong (each reading on after `adapter.`).
    """
    given = adapter.get("adapter_name_or_path")
    if not isinstance(given, str) or not given.strip() or "\0" in given:
        return dict(adapter), []
    folder = base / os.path.expanduser(given)
    stored, problem = _read(folder)
    if problem:
        return dict(adapter), [f"adapter_name_or_path: {problem}"]
    kind = stored.get("peft_type")
    model = ADAPTERS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return dict(adapter), [
            f"adapter_name_or_path: {folder / CONFIG} has peft_type {shown(kind)}, which is not done"
        ]
    merged = dict(adapter)
    problems = []
    for key, value in stored.items():
        if key in model.from_weights or key == "adapter_name_or_path":
            continue
        if key in _HARMLESS_INITIAL and value in _HARMLESS_INITIAL[key]:
            continue
        if key not in model.model_fields and key not in model.refused and value in _NOTHING:
            continue  # a field of a newer peft, not used
        if key not in adapter:
            refused = model.refused.get(key)
            if key in model.model_fields:
                merged[key] = value
            elif refused is None:
                problems.append(
                    f"adapter_name_or_path: {folder / CONFIG} uses {key}, which is not known here"
                )
            elif not refused.asks_for_nothing(value):
                problems.append(
                    f"adapter_name_or_path: {folder / CONFIG} uses {key}, which {_said(refused.advice)}"
                )
        elif (
            key in model.model_fields
            and key not in model.free_with_weights
            and not _same(adapter[key], value)
        ):
            problems.append(
                f"{key}: is {shown(adapter[key])} here but {shown(value)} in {folder / CONFIG}: leave it out of the task"
            )
    return merged, problems


def _said(advice: str) -> str:
    return (
        "is a peft field that megatron-mux does not do yet"
        if advice.startswith("is a peft")
        else f"is refused ({advice})"
    )


def _same(mine: Any, its: Any) -> bool:
    if isinstance(mine, list) and isinstance(its, list):
        return sorted(map(str, mine)) == sorted(map(str, its))
    return bool(mine == its)


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    """The stored config, or what is wrong with the adapter's directory."""
    if not os.path.isdir(folder):
        return {}, f"no such directory: {folder} (adapters are read from disk, not from a hub)"
    try:
        stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{folder} holds no {CONFIG}: it is not a PEFT adapter"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{folder / CONFIG} cannot be read: {error}"
    if not isinstance(stored, dict):
        return {}, f"{folder / CONFIG} must hold a JSON object"
    if not os.path.isfile(folder / WEIGHTS):
        return {}, f"{folder} holds no {WEIGHTS}: save the adapter with safe_serialization"
    return stored, ""
