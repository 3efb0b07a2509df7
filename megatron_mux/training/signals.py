"""Signals that end a run in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron_mux.training.loop import Loop


@contextmanager
def stop_on_signals(loop: Loop) -> Iterator[None]:
    """SIGTERM, SIGINT, SIGHUP and `--exit-signal` let the step finish, save and leave.

    The first is what a preempting scheduler sends, the second a person, the third a terminal that closes (`nohup`
    ignores it). Python leaves signals to the main thread: a run in another thread does not take them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = {signal.SIGTERM, signal.SIGINT, signal.Signals[loop.arguments.exit_signal]}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.add(signal.SIGHUP)

    def stop(number: int, frame: FrameType | None) -> None:
        loop.stopping = True

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
