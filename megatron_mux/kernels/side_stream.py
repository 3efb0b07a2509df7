"""Work beside what a device computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work beside what a device computes: a stream of its own on a GPU; on a CPU it is done on the spot.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        there = device.type == "cuda" and torch.cuda.is_available()  # a dry run has none
        self._stream = torch.cuda.Stream(device) if there else None

    @contextmanager
    def after_what_came_before(self) -> Iterator[None]:
        """Let what is begun inside wait for what the device was told before, and for nothing after that."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what the device is told from here on wait for the work beside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
