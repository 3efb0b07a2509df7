"""Measures the memory that a computation takes beyond what was there before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import StepPosition


@dataclass(frozen=True)
class Peak:
    """Bytes that a computation took.

    Attributes:
        peak: The most at once, beyond what was there before.
        lasting: What is still there.
    """

    peak: int
    lasting: int


def measure(device: torch.device, compute: Callable[[], object], tries: int = 1) -> Peak:
    """Run a computation and measure its memory: on a GPU what the allocator holds for tensors, on a CPU the storages
    that operators make. Scratch memory inside a CPU's operators is not counted.

    Args:
        device: Where it computes.
        compute: The computation.
        tries: How often it is run; the least counts.
    """
    peaks = [_measure(device, compute) for _ in range(tries)]
    return Peak(min(peak.peak for peak in peaks), min(peak.lasting for peak in peaks))


def _measure(device: torch.device, compute: Callable[[], object]) -> Peak:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = compute()
        torch.cuda.synchronize(device)
        peak = Peak(
            torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
        )
        del result  # until here: what it holds counts
        return peak
    with Recorder(StepPosition(), device.type, 0, late=True) as recorder:
        return recorded(recorder, 1, compute)


def recorded(recorder: Recorder, block: int, compute: Callable[[], object]) -> Peak:
    """Run a computation while a recorder is entered, and measure its memory.

    Args:
        recorder: Sees the tensors that are made; it may have seen others before.
        block: Bytes that the allocator rounds up to.
        compute: The computation.
    """
    before = recorder.events
    result = compute()
    stream = recorder.done()
    del result  # until here: what it holds counts
    codes, sizes = np.array(stream.codes, np.int64), np.array(stream.sizes, np.int64)
    rounded = -(-sizes // block) * block
    changes = np.where(codes >= 0, rounded[codes], -rounded[~codes])[before:] if len(codes) else codes
    taken = np.append(0, np.cumsum(changes))
    return Peak(int(taken.max()), int(taken[-1]))
