"""Watches all ranks: when one dies or stalls, one rank says so, and all of them end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron_mux.errors import UserError, failed_allocation, is_of_a_connection, tell, told_elsewhere
from megatron_mux.liveness.endpoint import Endpoint, Hub, Spoke
from megatron_mux.liveness.heartbeat import Activity, End, Heartbeat, State
from megatron_mux.liveness.verdict import BEAT_S, FailureDetector, Verdict

_SECONDS_TO_END = 15.0
"""Seconds that saying why may take before the process ends without."""

_SECONDS_TO_LEAVE = 5.0
"""Seconds that leaving waits for the watching thread."""


class Liveness(Heartbeat):
    """Watches all ranks while it is entered; every rank of a world of several enters one.

    A thread of each rank tells rank 0 once a second what the main thread does. If a rank has died, has failed or keeps
    others waiting, rank 0 says so, and the threads end all processes at once, since main threads may be stuck in a
    collective for ever. If rank 0 itself dies, the others notice by their connections.

    Leaving it by an error that another rank's death caused waits for the verdict, which ends the process. Leaving it
    out of memory ends all processes: the others may wait in a collective for what this one has not computed.

    Args:
        rank, world_size: Of this process.
        name: What messages call it: its rank, what it does, its host.
        timeout: Seconds that a rank may keep others waiting.
        advice: A sentence that says what to do after such an end.
        before_exit: Called before the process ends.
        program: Printed before the message.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        name: str,
        timeout: float,
        advice: str,
        before_exit: Callable[[], None],
        program: str = "pretrain_mux.py",
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._name = name
        self._detector = FailureDetector(timeout)
        self._advice = advice
        self._before_exit = before_exit
        self._program = program
        self._activity = Activity("starting", True, time.monotonic())
        self._lost_since: float | None = None
        self._how: End = ""
        self._reason = ""
        self._left = threading.Event()
        self._endpoint: Endpoint
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)

    def at(self, what: object, long: bool = False) -> None:
        """See `Heartbeat`."""
        self._activity = Activity(what, long, time.monotonic())

    def __enter__(self) -> Liveness:
        """Connect; every rank does.

        Raises:
            UserError: Rank 0 cannot be reached.
        """
        shared: list[Any] = [None]
        if self.rank == 0:
            hub = Hub(self._detector, self._name, self.world_size, self._state())
            self._endpoint = hub
            shared = [(hub.address, self._name)]
        dist.broadcast_object_list(shared, src=0)
        address, name = shared[0]
        try:
            if self.rank == 0:
                hub.accept()
            else:
                self._endpoint = Spoke(self._detector, self.rank, self._name, name, address)
        except OSError as error:
            raise UserError(
                f"{name} cannot be reached on port {address[0]}: {error}: let processes connect to each other"
            ) from error
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell how this rank leaves; if another rank is to blame, wait to be ended."""
        if error is None:
            self._leave("done")
        elif isinstance(error, torch.OutOfMemoryError):
            self._end_all(error)
        elif isinstance(error, RuntimeError) and is_of_a_connection(error):
            self._wait_to_be_ended(error)
        elif isinstance(error, Exception) and not isinstance(error, UserError):
            self._leave("failed", _in_a_line(error))
        else:
            self._leave("told")  # the caller tells it; whoever interrupts a run knows why

    def fail(self, error: Exception) -> None:
        """See `Heartbeat`; if another rank is to blame, the verdict ends this one."""
        lost = isinstance(error, RuntimeError) and is_of_a_connection(error)
        if lost and not isinstance(error, torch.OutOfMemoryError):
            self._reason, self._lost_since = _in_a_line(error), time.monotonic()
            self._thread.join(self._detector.max_silence + _SECONDS_TO_END)
        self._end_all(error)

    def _end_all(self, error: Exception) -> None:
        """Say what failed, and end all ranks: others may wait for this one in a collective."""
        self._limit_time()
        why = f"failed: {_in_a_line(error)}"
        if isinstance(error, torch.OutOfMemoryError):
            why = f"ran out of memory at {self._activity.what}: {failed_allocation(error)}"
        self._say(f"{self._name} {why}")
        self._leave("out of memory")
        self._before_exit()
        os._exit(1)

    def _wait_to_be_ended(self, error: RuntimeError) -> None:
        # The launcher tells everyone to stop as soon as one is gone; the reason is still to be said.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._reason, self._lost_since = _in_a_line(error), time.monotonic()
        if not told_elsewhere(error):
            self._thread.join(self._detector.max_silence + _SECONDS_TO_END)
        signal.signal(signal.SIGTERM, before)
        self._leave("told")

    def _leave(self, end: End, reason: str = "") -> None:
        self._reason = reason or self._reason
        self._how = end
        self._left.set()
        self._endpoint.wake()
        self._thread.join(_SECONDS_TO_LEAVE)

    def _state(self) -> State:
        """This rank's state now."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        state = self._activity.state(frame, self._lost_since, time.monotonic())
        return replace(state, end=self._how, reason=self._reason)

    def _watch(self) -> None:
        """The thread's work."""
        try:
            verdict = self._beat()
        except BaseException:  # a defect here ends the watch, not the run
            self._endpoint.exchange(State("", "", True, 0.0, end="done"), time.monotonic())
            self._endpoint.leave(None)
            raise
        self._endpoint.leave(verdict)
        if verdict is not None and not self._left.wait(verdict.patience):
            self._end(verdict)

    def _beat(self) -> Verdict | None:
        """Beat until this rank has left, all have to stop, or rank 0 no longer watches."""
        beat = min(BEAT_S, self._detector.max_silence / 5)
        while not self._endpoint.over:
            state = self._state()
            verdict = self._endpoint.exchange(state, time.monotonic() + beat)
            if verdict is not None or state.end:
                return verdict
        return None

    def _end(self, verdict: Verdict) -> None:
        """Say why, then end the process: rank 0 says it, or every other rank if rank 0 is gone."""
        self._limit_time()
        if verdict.text and not verdict.said:
            self._say(verdict.text)
        self._before_exit()
        os._exit(1)

    def _say(self, why: str) -> None:
        tell(UserError(f"{why}: stopping. {self._advice}"), self._program)

    def _limit_time(self) -> None:
        """End the process soon, even if saying why takes too long."""
        late = threading.Timer(_SECONDS_TO_END, os._exit, (1,))
        late.daemon = True
        late.start()


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
