"""One task of any kind, alone: peft where peft knows the kind, plain PyTorch where it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor

from . import peft_solo, plain
from .loop import Example, SoloResult


def random_adapter(
    path: Path | str, section: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """An adapter in which nothing is zero, by saved key."""
    if section["peft_type"] in PEFT_TYPE_TO_CONFIG_MAPPING:
        return peft_solo.random_adapter(path, section, seed, dtype)
    return plain.random_adapter(path, section, seed, dtype)


def train_solo(
    path: Path | str,
    section: Mapping[str, Any],
    training: Mapping[str, Any],
    steps: Sequence[Sequence[Example]],
    initial: Mapping[str, Tensor],
    dtype: torch.dtype = torch.float32,
) -> SoloResult:
    """Train from `initial` on the examples of `steps`."""
    if section["peft_type"] in PEFT_TYPE_TO_CONFIG_MAPPING:
        return peft_solo.train_solo(path, section, training, steps, initial, dtype)
    return plain.train_solo(path, section, training, steps, initial, dtype)
