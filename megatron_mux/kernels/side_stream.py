"""A CUDA stream beside the one that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Runs work beside computation: on a stream of its own on a GPU, at once on a CPU.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        there = device.type == "cuda" and torch.cuda.is_available()  # a dry run has none
        self._stream = torch.cuda.Stream(device) if there else None

    @contextmanager
    def after_what_came_before(self) -> Iterator[None]:
        """Run what is enqueued inside on the side stream, after everything enqueued before."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let computation enqueued from now on wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
