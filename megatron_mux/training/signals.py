"""Signals that end a run in good order."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_mux.training.loop import Loop


@contextmanager
def stop_on_signals(loop: Loop) -> Iterator[None]:
    """SIGTERM, SIGINT and `--exit-signal` let the step finish, save and leave.

    The first is what a preempting scheduler sends, the second a person.
    """
    numbers = {signal.SIGTERM, signal.SIGINT, signal.Signals[loop.arguments.exit_signal]}

    def stop(number: int, frame: FrameType | None) -> None:
        loop.stopping = True

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
