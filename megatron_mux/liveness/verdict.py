"""Who is to blame when ranks no longer get on: a function of what is known of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mux.liveness.heartbeat import State

BEAT_S = 1.0
"""Seconds between two beats of a rank."""

_MOST_SILENCE_S = 60.0
"""Seconds of silence after which a rank counts as lost, if the timeout is long. A process that ends is seen at once, by
its connection: this is for one that is stopped or whose machine or network is gone. One whose beat is merely held up,
by a library that keeps Python's lock, is back by then."""

_PATIENCE_S = 3.0
"""Seconds between an error on one rank and the end of the others: its trace is printed first, and a process that leaves
by itself says more than one that is ended."""


@dataclass(frozen=True)
class Seen:
    """What is known of one rank.

    Attributes:
        name: Rank, stage and host.
        state: What it said last.
        silent: Seconds since then.
        closed: Its connection is closed.
    """

    name: str
    state: State
    silent: float = 0.0
    closed: bool = False


@dataclass(frozen=True)
class Verdict:
    """Why every rank has to stop.

    Attributes:
        rank: Who is to blame; None where that cannot be said.
        text: What to say; empty if it was told already.
        patience: Seconds in which ranks may still leave by themselves.
        said: Rank 0 says it, so that no other has to.
    """

    rank: int | None
    text: str
    patience: float = 0.0
    said: bool = False


@dataclass(frozen=True)
class Judge:
    """Decides whether all ranks have to stop.

    Attributes:
        timeout: The seconds that a rank may keep others waiting.
    """

    timeout: float

    @property
    def most_silence(self) -> float:
        """Seconds of silence after which a rank counts as lost."""
        return min(_MOST_SILENCE_S, self.timeout / 2)

    def __call__(self, ranks: Sequence[Seen]) -> Verdict | None:
        """The reason to stop, if there is one. What is a cause comes before what may be its consequence.

        Args:
            ranks: All ranks that are watched, by rank.
        """
        return self._dead(ranks) or self._failed(ranks) or self._lost(ranks) or self._stalled(ranks)

    def _dead(self, ranks: Sequence[Seen]) -> Verdict | None:
        gone = [rank for rank, seen in enumerate(ranks) if seen.closed and not seen.state.end]
        if gone:
            return Verdict(gone[0], gone_text([ranks[rank].name for rank in gone]))
        silent = [
            rank
            for rank, seen in enumerate(ranks)
            if not seen.state.end and not seen.closed and seen.silent >= self.most_silence
        ]
        if silent:
            return Verdict(silent[0], silent_text([ranks[rank].name for rank in silent], self.most_silence))
        return None

    def _failed(self, ranks: Sequence[Seen]) -> Verdict | None:
        for rank, seen in enumerate(ranks):
            if seen.state.end == "out of memory":  # the others wait for it in a collective for good
                return Verdict(rank, "")
        for rank, seen in enumerate(ranks):
            if seen.state.end == "failed":
                return Verdict(rank, f"{seen.name} failed: {seen.state.reason}", _PATIENCE_S)
        for rank, seen in enumerate(ranks):
            if seen.state.end == "told":
                return Verdict(rank, "", _PATIENCE_S)
        return None

    def _lost(self, ranks: Sequence[Seen]) -> Verdict | None:
        """A rank whose connections broke, though by now whoever closed them would be known."""
        lost = {
            rank: seen
            for rank, seen in enumerate(ranks)
            if not seen.state.end and (seen.state.lost or 0.0) >= _PATIENCE_S
        }
        if any(
            "timeout" in seen.state.reason.lower().replace("timed out", "timeout") for seen in lost.values()
        ):
            return _blame(ranks)
        for rank, seen in lost.items():
            return Verdict(rank, f"{seen.name} lost its connections: {seen.state.reason}")
        return None

    def _stalled(self, ranks: Sequence[Seen]) -> Verdict | None:
        """A rank that keeps another one waiting for too long, or that itself is at one thing for too long.

        The former alone would do on CPUs. On GPUs a host that waits for another rank's operation waits in any call that
        needs a result, and looks like one that works.
        """
        for state in (seen.state for seen in ranks if not seen.state.end):
            if state.seconds >= self.timeout and not state.long and state.waited is None:
                return _blame(ranks)
            if state.waited is not None and state.waited >= self.timeout:
                return _blame(ranks)
        return None


def _blame(ranks: Sequence[Seen]) -> Verdict:
    """Who keeps the others waiting: of those that do not wait themselves, who came to a halt first."""
    present = {rank: seen for rank, seen in enumerate(ranks) if not seen.state.end}
    working = {rank: seen for rank, seen in present.items() if seen.state.waited is None}
    if not working:
        at = "; ".join(f"{seen.name} at {_place(seen.state)}" for seen in present.values())
        return Verdict(None, f"all ranks wait for each other: {at}")
    longest = max(seen.state.seconds + seen.silent for seen in working.values())
    # What was said a beat ago is too old to tell apart who came a beat before another.
    first = {r: seen for r, seen in working.items() if seen.state.seconds + seen.silent > longest - BEAT_S}
    said = [f"{s.name} has been at {_place(s.state)} for {s.state.seconds:.0f} s" for s in first.values()]
    waits = "" if len(working) == len(present) else " while others wait"
    return Verdict(min(first), "; ".join(said) + waits)


def gone_text(names: Sequence[str]) -> str:
    """What to say of ranks whose connection is closed though they did not say that they leave."""
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} gone: killed, out of memory, or crashed"


def silent_text(names: Sequence[str], seconds: float) -> str:
    """What to say of ranks that no longer answer."""
    verb = "has" if len(names) == 1 else "have"
    return f"{' and '.join(names)} {verb} not answered for {seconds:.0f} s"


def _place(state: State) -> str:
    return f"{state.what!r}" + (f" ({state.where})" if state.where else "")
