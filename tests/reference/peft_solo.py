"""The kinds that peft has, trained alone with `transformers` and `peft` and nothing of ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from .loop import Example, Recipe, SoloResult, pad, train


def load_model(path: Path | str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The Hugging Face model, without dropout and without trainable parameters."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    model.eval()  # GPT-2 and OPT configs carry dropout; the backbone's own is off by contract
    model.requires_grad_(False)
    return model


def wrap(
    model: nn.Module, adapter: Mapping[str, Any], initial: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """`model` with the adapter of a tasks.yaml block on it (fields as in peft), starting from `initial`."""
    fields = {
        key: value for key, value in adapter.items() if key not in ("peft_type", "adapter_name_or_path")
    }
    config = PEFT_TYPE_TO_CONFIG_MAPPING[adapter["peft_type"]](task_type="CAUSAL_LM", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out is corrected for Conv1D, with a warning
        logging.disable(logging.WARNING)
        peft_model = get_peft_model(model, config)
        logging.disable(logging.NOTSET)
    peft_model.eval()
    if initial is not None:
        install(peft_model, initial)
    return peft_model


def install(peft_model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved tensors in place; every adapter tensor must be there, and no other."""
    wanted = get_peft_model_state_dict(peft_model)
    if set(wanted) != set(tensors):
        raise AssertionError(f"adapter keys differ: {sorted(set(wanted) ^ set(tensors))}")
    set_peft_model_state_dict(peft_model, {key: value.clone() for key, value in tensors.items()})


def random_adapter(
    path: Path | str, adapter: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """An adapter that does something: random values of everyday size in every tensor, B of LoRA included."""
    fresh = export(wrap(load_model(path), adapter))
    shapes = {key: value.shape for key, value in fresh.items()}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for key in sorted(shapes):
        noise = torch.randn(shapes[key], generator=generator, dtype=torch.float64)
        if "ia3_l" in key:
            noise = 1 + 0.1 * noise
        elif "lora_magnitude" in key:
            noise = fresh[key].double() * (1 + 0.1 * noise)
        elif "lora_A" in key or key in ("base_model.vera_A", "base_model.vera_B"):
            noise = noise / shapes[key][-1] ** 0.5
        elif "vera_lambda" in key:
            noise = 1 + 0.3 * noise
        else:
            noise = 0.1 * noise
        tensors[key] = noise.to(dtype)
    return tensors


def export(peft_model: nn.Module) -> dict[str, Tensor]:
    """The adapter under the names it is saved with."""
    return {key: value.detach().clone() for key, value in get_peft_model_state_dict(peft_model).items()}


def trainable(peft_model: nn.Module) -> dict[str, nn.Parameter]:
    """What peft lets the optimizer see."""
    return {name: value for name, value in peft_model.named_parameters() if value.requires_grad}


def train_solo(
    path: Path | str,
    adapter: Mapping[str, Any],
    training: Mapping[str, Any],
    steps: Sequence[Sequence[Example]],
    initial: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> SoloResult:
    """Train one task alone, from `initial`, on `steps` (see `reference.loop.train`)."""
    peft_model = wrap(load_model(path, dtype), adapter, initial)
    return train(peft_model, trainable(peft_model), steps, Recipe.of(training), lambda: export(peft_model))


@torch.no_grad()
def logits(model: nn.Module, examples: Sequence[Example]) -> list[Tensor]:
    """`[L, V]` logits of every example, padding and virtual tokens left out."""
    ids, mask, _ = pad(examples)
    rows = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -ids.shape[1] :]
    return [row[: len(tokens)] for row, (tokens, _) in zip(rows, examples, strict=True)]
