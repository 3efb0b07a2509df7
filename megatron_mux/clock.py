"""Times of what runs on a device, taken without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_mux import runtime

Mark = Any
"""A moment taken by a `Clock`: seconds, or an event of CUDA."""


class Clock:
    """Takes times of what is enqueued on a device, without making the host wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = runtime.is_gpu(device)

    def mark(self) -> Mark:
        """Mark the present; on a GPU, the moment at which all that has been enqueued so far is done."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """The times of marks on the host's monotonic clock; on a GPU this waits for what has been enqueued."""
        if not marks or not self._is_gpu:
            return list(marks)
        # A new mark, so that moments read in several calls are on one clock, however long ago they were.
        last = self.mark()
        last.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(last) / 1000 for mark in marks]
