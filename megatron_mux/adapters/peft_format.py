"""Reads stored adapters, and checks them against a task and a backbone before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.per_expert import fused_config, fused_tensors
from megatron_mux.errors import UserError
from megatron_mux.saved_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_mux.shape import BackboneShape

CONFIG, WEIGHTS = ADAPTER_CONFIG, ADAPTER_WEIGHTS


def read_adapter(directory: Path | str, spec: AdapterSpec, shape: BackboneShape) -> dict[str, Tensor]:
    """Read the tensors of the adapter that a task starts from, as fp32 on the CPU.

    Args:
        directory: Holds `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        UserError: A file is missing or unreadable, or the adapter is of another kind, rank, target or backbone.
    """
    config, tensors = read_files(directory)
    kind = config.get("peft_type")
    if kind == "LORA":
        try:
            config, tensors = fused_config(config, tensors.keys()), fused_tensors(tensors)
        except UserError as error:
            raise UserError(f"{Path(directory) / WEIGHTS} {error}") from None
    if kind != spec.peft_type:
        raise UserError(f"{Path(directory) / CONFIG} is a {kind} adapter, the task asks for {spec.peft_type}")
    problems = [
        f"{Path(directory) / CONFIG} has {name} = {config[name]}, the task {getattr(spec, name)}: make them agree"
        for name in sorted(
            type(spec).model_fields.keys() - AdapterSpec.model_fields.keys() - spec.free_with_weights
        )
        # Of modules, the tensors tell.
        if name in config
        and not name.endswith(("_modules", "_parameters"))
        and config[name] != getattr(spec, name)
    ]
    if not problems:
        tensors = spec.from_files(tensors, shape)
        checked = check_tensors(tensors, spec, shape)
        problems = [f"{Path(directory) / WEIGHTS}: {problem}" for problem in checked]
    if problems:
        raise UserError(*problems)
    return tensors


def read_files(directory: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read config and tensors of a stored adapter.

    Raises:
        UserError: A file is missing or unreadable.
    """
    directory = Path(directory)
    config, weights = directory / CONFIG, directory / WEIGHTS
    missing = [path.name for path in (config, weights) if not path.is_file()]
    if missing:
        raise UserError(
            f"{directory} holds no {' and no '.join(missing)}: it is not a PEFT adapter to read here"
        )
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{config} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{config} must hold a JSON object")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(weights)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{weights} is not a readable safetensors file: {error}") from None
    wrong = [key for key, tensor in tensors.items() if not tensor.is_floating_point()]
    if wrong:
        raise UserError(f"{weights}: {wrong[0]} holds {tensors[wrong[0]].dtype}, not numbers to train")
    return content, {key: tensor.to(torch.float32) for key, tensor in tensors.items()}


def with_fused_experts(directory: Path | str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a stored adapter, with experts that were adapted one by one taken together.

    Raises:
        UserError: They cannot be.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(Path(directory) / WEIGHTS, "pt") as file:
            keys = set(file.keys())
    except (OSError, SafetensorError):
        return dict(config)  # said where the tensors are read
    return fused_config(config, keys)


def check_tensors(tensors: Mapping[str, Tensor], spec: AdapterSpec, shape: BackboneShape) -> list[str]:
    """Compare `tensors` with those of a task's adapter on a backbone.

    Args:
        tensors: Full tensors by key.

    Returns:
        One problem for tensors missing, one for tensors too many, one for wrong shapes; empty if all is well.
    """
    known = spec.tensors(shape)
    wanted = {key: tensor.shape for key, tensor in known.items() if tensor.stored}
    missing = [key for key in wanted if key not in tensors and not known[key].derived]
    stray = [key for key in tensors if key not in known]
    problems = []
    if missing:
        problems.append(
            f"lacks {_some(missing)}: the task's targets, or the backbone, are not this adapter's"
        )
    if stray:
        problems.append(f"holds {_some(stray)}, which the task does not target or the backbone does not have")
    shapes = [key for key in wanted if key in tensors and tuple(tensors[key].shape) != wanted[key]]
    if shapes:
        key = shapes[0]
        more = f" ({len(shapes) - 1} more like it)" if len(shapes) > 1 else ""
        problems.append(
            f"{key} has shape {list(tensors[key].shape)} where the task and the backbone need {list(wanted[key])}{more}"
        )
    return problems


def _some(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
