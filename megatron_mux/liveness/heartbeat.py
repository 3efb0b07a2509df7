"""The heartbeat: what a rank is doing, noted by its main thread, sent by its watching thread once a second."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Literal

End = Literal["", "done", "told", "failed", "out of memory"]
"""How a rank left: not yet; with its work done; with a mistake, or out of memory, as it has told; with an error."""


class Heartbeat:
    """Is told what the main thread does. This one ignores it: for a process that nobody watches."""

    def at(self, what: object, long: bool = False) -> None:
        """Note what the main thread begins. Called in a step's hot path: `what` is formatted later, if at all.

        Args:
            what: An action, or words such as "saving".
            long: Whether it may take longer than the timeout, provided that no other rank waits for it that long.
        """

    def fail(self, error: Exception) -> None:
        """End all ranks by an error of another thread than the main one, after which ranks are out of step.

        Args:
            error: Where nobody watches, it is left to the caller.
        """


@dataclass(frozen=True)
class State:
    """A rank's state, sent with each beat.

    Attributes:
        what: What its main thread does.
        where: File and line of that.
        long: Whether it may take longer than the timeout.
        seconds: How long it has been doing it.
        waited: How long it has been waiting for other ranks in that, without a break until now; None: it works.
        lost: Seconds since it lost a connection to another rank; None: it lost none.
        end: How it left, or empty.
        reason: The error that it left with, or lost the connection with.
    """

    what: str
    where: str
    long: bool
    seconds: float
    waited: float | None = None
    lost: float | None = None
    end: End = ""
    reason: str = ""


@dataclass
class Activity:
    """What the main thread does, observed from beat to beat.

    Attributes:
        what, long: See `Heartbeat.at`.
        since: When it began, in seconds of this host's monotonic clock.
    """

    what: object
    long: bool
    since: float
    _waits_since: float | None = None

    def state(self, frame: FrameType | None, lost_since: float | None, now: float) -> State:
        """The state of the main thread now.

        Args:
            frame: Its innermost Python frame.
            lost_since: When it lost a connection, if it did.
            now: On the clock of `since`.
        """
        if lost_since is None and not (frame is not None and waits_for_others(frame)):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        return State(
            what=str(self.what),
            where="" if frame is None else f"{PurePath(frame.f_code.co_filename).name}:{_line(frame)}",
            long=self.long,
            seconds=now - self.since,
            waited=None if self._waits_since is None else now - self._waits_since,
            lost=None if lost_since is None else now - lost_since,
        )


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits for other ranks.

    Found from the frame, not told by the main thread, since ranks wait in many places, Megatron-Core's among them: in
    collectives, which end in a function of `torch.distributed`, and for pending operations (`work.wait()`).
    """
    if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        return True
    return ".wait(" in linecache.getline(frame.f_code.co_filename, _line(frame), frame.f_globals)


def _line(frame: FrameType) -> int:
    """The current line of a frame; 0 while it is between lines."""
    line: int | None = frame.f_lineno
    return line or 0
