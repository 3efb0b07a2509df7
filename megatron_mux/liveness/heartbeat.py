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
    """Hears what the main thread is at. This one keeps nothing: for a process that nobody waits for."""

    def at(self, what: object, long: bool = False) -> None:
        """The main thread begins something. Called in a step's hot path: `what` is not made a text of here.

        Args:
            what: An action, or words such as "saving".
            long: It may take longer than the timeout, as long as no other rank waits for it that long.
        """


@dataclass(frozen=True)
class Mark:
    """What the main thread said last.

    Attributes:
        what: See `Heartbeat.at`.
        long: See there.
        since: When, in seconds of this host's monotonic clock.
    """

    what: object
    long: bool
    since: float


@dataclass(frozen=True)
class State:
    """What a rank says of itself with each beat; as JSON on its way.

    Attributes:
        what: What its main thread is at.
        where: File and line of that.
        long: It may take longer than the timeout.
        seconds: For how long it has been at it.
        waited: For how long, up to now and without a break, it has waited for other ranks in that; None: it works.
        lost: For how long it has been without a connection to another rank; None: it lost none.
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


class Look:
    """Looks at the main thread from beat to beat."""

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._waits_since: float | None = None

    def __call__(self, mark: Mark, frame: FrameType | None, lost_since: float | None, now: float) -> State:
        """The main thread as it is now.

        Args:
            mark: What it said last.
            frame: Its innermost Python frame.
            lost_since: When it met a lost connection, if it did.
            now: On the clock of `mark`.
        """
        if mark is not self._mark:
            self._mark, self._waits_since = mark, None
        if lost_since is None and not (frame is not None and waits_for_others(frame)):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now
        return State(
            what=str(mark.what),
            where="" if frame is None else f"{PurePath(frame.f_code.co_filename).name}:{_line(frame)}",
            long=mark.long,
            seconds=now - mark.since,
            waited=None if self._waits_since is None else now - self._waits_since,
            lost=None if lost_since is None else now - lost_since,
        )


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread with this innermost frame waits for other ranks.

    That is seen here instead of being said by the main thread, since ranks wait in many places, Megatron-Core's among
    them: in collectives, which end in a function of `torch.distributed`, and for operations under way (`work.wait()`).
    """
    if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        return True
    return ".wait(" in linecache.getline(frame.f_code.co_filename, _line(frame), frame.f_globals)


def _line(frame: FrameType) -> int:
    """The line a frame is at; a running one may be between lines, at none."""
    line: int | None = frame.f_lineno
    return line or 0
