"""Measures the memory that a computation takes beyond what was there before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from megatron_mux.memory.fake_gpu.place import Place
from megatron_mux.memory.fake_gpu.recorder import Recorder

T = TypeVar("T")


@dataclass(frozen=True)
class Peak:
    """Bytes that a computation took.

    Attributes:
        peak: The most at once, beyond what was there before.
        lasting: What is still there.
    """

    peak: int
    lasting: int


def measure(device: torch.device, compute: Callable[[], T]) -> tuple[T, Peak]:
    """Run a computation and measure its memory: on a GPU what the allocator holds for tensors, on a CPU the storages
    that operators make. Scratch memory inside a CPU's operators is not counted.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = compute()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return result, Peak(peak, torch.cuda.memory_allocated(device) - before)
    with Recorder(Place(), device.type, 0, late=True) as recorder:
        return recorded(recorder, 1, compute)


def recorded(recorder: Recorder, block: int, compute: Callable[[], T]) -> tuple[T, Peak]:
    """Run a computation while a recorder is entered, and measure its memory.

    Args:
        recorder: Sees the tensors that are made; it may have seen others before.
        block: Bytes that the allocator rounds up to.
        compute: The computation.

    Returns:
        What it returned, and its memory.
    """
    before = recorder.events
    result = compute()
    stream = recorder.done()  # with what the result holds
    codes, sizes = np.array(stream.codes, np.int64), np.array(stream.sizes, np.int64)
    rounded = -(-sizes // block) * block
    changes = np.where(codes >= 0, rounded[codes], -rounded[~codes])[before:] if len(codes) else codes
    taken = np.append(0, np.cumsum(changes))
    return result, Peak(int(taken.max()), int(taken[-1]))
