"""Finds the rank that failed or keeps the others waiting: a function of what is known of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mux.liveness.heartbeat import State

BEAT_S = 1.0
"""Seconds between two beats of a rank."""

_MAX_SILENCE_S = 60.0
"""Seconds of silence after which a rank counts as lost, if the timeout is long. A process that ends is noticed at once,
by its connection: this is for one that is stopped or whose machine or network is gone. One whose beat is only held up,
by a library that keeps Python's lock, is back by then."""

_PATIENCE_S = 3.0
"""Seconds between an error on one rank and the end of the others: its trace is printed first, and a process that leaves
by itself says more than one that is ended."""


@dataclass(frozen=True)
class RankView:
    """What rank 0 knows of one rank.

    Attributes:
        name: Rank, stage and host.
        state: Its last state.
        silent: Seconds since then.
        closed: Whether its connection is closed.
    """

    name: str
    state: State
    silent: float = 0.0
    closed: bool = False


@dataclass(frozen=True)
class Verdict:
    """Why every rank has to stop.

    Attributes:
        rank: The rank to blame; None if it is not known.
        text: The message; empty if it has been printed.
        patience: Seconds in which ranks may still leave by themselves.
        said: Whether rank 0 prints it, so that no other rank has to.
    """

    rank: int | None
    text: str
    patience: float = 0.0
    said: bool = False


@dataclass(frozen=True)
class FailureDetector:
    """Decides whether all ranks have to stop.

    Attributes:
        timeout: Seconds that a rank may keep others waiting.
    """

    timeout: float

    @property
    def max_silence(self) -> float:
        """Seconds of silence after which a rank counts as lost."""
        return min(_MAX_SILENCE_S, self.timeout / 2)

    def __call__(self, ranks: Sequence[RankView]) -> Verdict | None:
        """The reason to stop, if any; causes are looked for before their possible consequences."""
        return self._dead(ranks) or self._failed(ranks) or self._lost(ranks) or self._stalled(ranks)

    def _dead(self, ranks: Sequence[RankView]) -> Verdict | None:
        gone = [rank for rank, view in enumerate(ranks) if view.closed and not view.state.end]
        if gone:
            return Verdict(gone[0], gone_text([ranks[rank].name for rank in gone]))
        silent = [
            rank
            for rank, view in enumerate(ranks)
            if not view.state.end and not view.closed and view.silent >= self.max_silence
        ]
        if silent:
            return Verdict(silent[0], silent_text([ranks[rank].name for rank in silent], self.max_silence))
        return None

    def _failed(self, ranks: Sequence[RankView]) -> Verdict | None:
        for rank, view in enumerate(ranks):
            if view.state.end == "out of memory":  # the others wait for it in a collective for good
                return Verdict(rank, "")
        for rank, view in enumerate(ranks):
            if view.state.end == "failed":
                return Verdict(rank, f"{view.name} failed: {view.state.reason}", _PATIENCE_S)
        for rank, view in enumerate(ranks):
            if view.state.end == "told":
                return Verdict(rank, "", _PATIENCE_S)
        return None

    def _lost(self, ranks: Sequence[RankView]) -> Verdict | None:
        """A rank that lost its connections, though the rank that closed them would be known by now."""
        lost = {
            rank: view
            for rank, view in enumerate(ranks)
            if not view.state.end and (view.state.lost or 0.0) >= _PATIENCE_S
        }
        if any(
            "timeout" in view.state.reason.lower().replace("timed out", "timeout") for view in lost.values()
        ):
            return _blame(ranks)
        for rank, view in lost.items():
            return Verdict(rank, f"{view.name} lost its connections: {view.state.reason}")
        return None

    def _stalled(self, ranks: Sequence[RankView]) -> Verdict | None:
        """A rank that keeps another one waiting for too long, or that does one thing for too long.

        The former would do on CPUs. On GPUs a host that waits for another rank's operation waits in whichever call
        needs a result, and looks like one that works.
        """
        for state in (view.state for view in ranks if not view.state.end):
            if state.seconds >= self.timeout and not state.long and state.waited is None:
                return _blame(ranks)
            if state.waited is not None and state.waited >= self.timeout:
                return _blame(ranks)
        return None


def _blame(ranks: Sequence[RankView]) -> Verdict:
    """The rank that keeps the others waiting: of those that do not wait themselves, the one that halted first."""
    present = {rank: view for rank, view in enumerate(ranks) if not view.state.end}
    working = {rank: view for rank, view in present.items() if view.state.waited is None}
    if not working:
        at = "; ".join(f"{view.name} at {_place(view.state)}" for view in present.values())
        return Verdict(None, f"all ranks wait for each other: {at}")
    longest = max(view.state.seconds + view.silent for view in working.values())
    # States are a beat old: two ranks that halted within a beat cannot be told apart.
    first = {r: view for r, view in working.items() if view.state.seconds + view.silent > longest - BEAT_S}
    said = [f"{s.name} has been at {_place(s.state)} for {s.state.seconds:.0f} s" for s in first.values()]
    waits = "" if len(working) == len(present) else " while others wait"
    return Verdict(min(first), "; ".join(said) + waits)


def gone_text(names: Sequence[str]) -> str:
    """The message for ranks whose connection closed without their leaving."""
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} gone: killed, out of memory, or crashed"


def silent_text(names: Sequence[str], seconds: float) -> str:
    """The message for ranks that do not answer."""
    verb = "has" if len(names) == 1 else "have"
    return f"{' and '.join(names)} {verb} not answered for {seconds:.0f} s"


def _place(state: State) -> str:
    return f"{state.what!r}" + (f" ({state.where})" if state.where else "")
