"""Signals that end a run in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_mux.training.loop import Loop


@contextmanager
def stop_on_signals(loop: Loop) -> Iterator[None]:
    """SIGTERM and SIGINT let the step finish, save and leave: what a preempting scheduler and a person want."""

    def stop(number: int, frame: FrameType | None) -> None:
        loop.stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
