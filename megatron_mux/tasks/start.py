"""Merges the stored config of a PEFT adapter that a task starts from into the task's `adapter` section."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.peft_format import CONFIG, WEIGHTS, with_fused_experts
from megatron_mux.adapters.registry import KINDS
from megatron_mux.errors import UserError
from megatron_mux.saved_files import find_adapter
from megatron_mux.section import plain, shown

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
    named = base / os.path.expanduser(given)
    try:
        folder = find_adapter(named, lambda text: None)  # every rank comes here
    except UserError as error:
        return dict(adapter), [f"adapter_name_or_path: {error}"]
    if folder != named:
        adapter = {**adapter, "adapter_name_or_path": os.path.abspath(folder)}
    config = plain(str(folder / CONFIG))
    stored, problem = _read(folder)
    if problem:
        return dict(adapter), [f"adapter_name_or_path: {problem}"]
    kind = stored.get("peft_type")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        return dict(adapter), [
            f"adapter_name_or_path: {config} has peft_type {shown(kind)}, which is not supported"
        ]
    if "peft_type" in adapter and adapter["peft_type"] != kind:
        # The other fields mean something else then: nothing more to compare.
        return dict(adapter), [
            (
                f"peft_type: is {shown(adapter['peft_type'])} here but {shown(kind)} in {folder / CONFIG}: "
                "leave it out of the task"
            )
        ]
    if kind == "LORA":
        try:
            stored = with_fused_experts(folder, stored)
        except UserError as error:
            return dict(adapter), [f"adapter_name_or_path: {plain(str(folder / WEIGHTS))} {error}"]
    merged = dict(adapter)
    problems = []
    for key, value in stored.items():
        if key in model.model_fields and key != "adapter_name_or_path":
            if key not in adapter:
                merged[key] = value
            elif key not in model.free_with_weights and not _same(adapter[key], value):
                given_here, stored_there = shown(adapter[key]), f"{shown(value)} in {config}"
                problems.append(f"{key}: is {given_here} here but {stored_there}: leave it out of the task")
        elif not _can_be_left(key, value, model):
            problems.append(
                f"adapter_name_or_path: {config} has {plain(key)} {shown(value)}, which is not supported yet"
            )
    return merged, problems


def _can_be_left(key: str, value: Any, model: type[AdapterSpec]) -> bool:
    """Whether a stored field that our section lacks can be ignored."""
    if key == "adapter_name_or_path":
        return True
    field = model.refused.get(key)
    # Unknown ones are of a newer peft: without consequence as long as they are off.
    return value in _NOTHING if field is None else field.can_be_left(value)


def _same(mine: Any, its: Any) -> bool:
    if isinstance(mine, list) and isinstance(its, list):
        return sorted(map(str, mine)) == sorted(map(str, its))
    return bool(mine == its)


def _read(folder: Path) -> tuple[dict[str, Any], str]:
    """Read the stored config: the config, or the problem with the adapter's directory."""
    shown_folder, config = plain(str(folder)), plain(str(folder / CONFIG))
    if not os.path.isdir(folder):
        return {}, f"no such directory: {shown_folder} (adapters are read from disk, not from a hub)"
    try:
        stored = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{shown_folder} holds no {CONFIG}: it is not a PEFT adapter"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{config} cannot be read: {plain(str(error))}"
    if not isinstance(stored, dict):
        return {}, f"{config} must hold a JSON object"
    if not os.path.isfile(folder / WEIGHTS):
        return {}, f"{shown_folder} holds no {WEIGHTS}: save the adapter with safe_serialization"
    return stored, ""
