"""What is computed with Triton."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch


def suits_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton kernels compute a dtype on a device: on GPUs, but not in fp64."""
    return device.type == "cuda" and dtype != torch.float64


@cache
def has_triton() -> bool:
    """Whether Triton is installed. On a fake GPU nothing depends on it: a dry run predicts a machine that has it."""
    return importlib.util.find_spec("triton") is not None


def computes_nothing(*_: Any, **__: Any) -> None:
    """What stands for a kernel on a fake GPU, where its caller has allocated what it writes to."""


def notice_of_loops(device: torch.device) -> str | None:
    """What a user should know of a GPU without Triton: adapters and updates are slow there; None elsewhere."""
    if device.type != "cuda" or has_triton():
        return None
    return (
        "Triton is not installed: adapters and optimizers are computed task by task, which is several times as slow. "
        "Install it with: pip install 'triton>=3.6'"
    )
