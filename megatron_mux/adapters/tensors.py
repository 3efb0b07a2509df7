"""What the tensors of an adapter are, independent of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Init = Callable[[Tensor, torch.Generator], Any]
"""Fills a full fp32 tensor in place. The generator depends on the task's seed and the tensor's key alone."""


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor of an adapter.

    Attributes:
        layer: The layer that it belongs to; None: all layers share it.
        dim: The dimension that tensor ranks divide; None: each of them holds everything.
        expert_dim: Of routed experts, the dimension with the ranks of all: one expert's after the other's in dimension
            0, all experts' first ranks before their second ones in dimension 1.
        trained: Whether it is trained; else it is fixed, and each stage that has a part of the adapter holds it.
        stored: Whether it is stored with the adapter; else it can be made again.
        decay: Whether weight decay applies (not to biases and masks).
        derived: Whether it follows from the backbone's weights where a stored adapter lacks it.
        on_output: Whether it meets a BaseOp's finished output: then a tensor rank that holds everything has the whole
            gradient, except with sequence parallelism; else it has a part that must be summed.
    """

    shape: tuple[int, ...]
    layer: int | None
    init: Init
    dim: int | None = None
    trained: bool = True
    stored: bool = True
    decay: bool = True
    on_output: bool = False
    derived: bool = False
    expert_dim: int | None = None


def blank(tensors: Mapping[str, AdapterTensor]) -> dict[str, Tensor]:
    """Zeros without storage in place of an adapter's stored values, by key: for those that are known elsewhere."""
    stored = {key: tensor for key, tensor in tensors.items() if tensor.stored and not tensor.derived}
    return {key: torch.zeros(()).expand(tensor.shape) for key, tensor in stored.items()}


def constant(value: float) -> Init:
    """Initialise with one value."""
    return lambda full, _: full.fill_(value)


def uniform(full: Tensor, generator: torch.Generator) -> None:
    """Initialise a matrix as `torch.nn.Linear` does."""
    nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)


def of_backbone(full: Tensor, generator: torch.Generator) -> None:
    """Initialise with the backbone's weights, which only ranks that hold them can."""
    raise ValueError("a task's own rows of the vocabulary start from the backbone's")


def tensor_key(path: str, suffix: str) -> str:
    """Return the name that peft gives to an adapter's tensor at the module `path`."""
    return f"base_model.model.{path}.{suffix}"
