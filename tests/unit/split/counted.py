"""Counts the memory of real passes, which predictions are held against."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_mux.memory.fake_gpu.recorder import Recorder
from megatron_mux.memory.fake_gpu.step_position import StepPosition
from megatron_mux.split.server.session_memory import Meter, Peak
from megatron_mux.split.server.session_prediction import count


def meter(device: torch.device, tries: int = 1) -> Meter:
    """Counts on a GPU what the allocator holds for tensors, on a CPU the storages that operators make.

    Args:
        device: Where passes are computed.
        tries: How often each is run, of which the least counts: where ranks share cores, gloo's threads sometimes
            release a message only after later tensors were made.
    """

    def least(compute: Callable[[], object]) -> Peak:
        peaks = [_once(device, compute) for _ in range(tries)]
        return Peak(min(peak.peak for peak in peaks), min(peak.lasting for peak in peaks))

    return least


def _once(device: torch.device, compute: Callable[[], object]) -> Peak:
    if device.type == "cpu":
        with Recorder(StepPosition(), device.type, 0, late=True) as recorder:
            return count(recorder, 1, compute)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = compute()
    torch.cuda.synchronize(device)
    most, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    del result  # until here: what it holds counts
    return Peak(most - before, after - before)
