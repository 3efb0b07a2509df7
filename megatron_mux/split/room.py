"""Whether one more session fits into the server's memory without anybody having to wait for ever."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_mux.split.session_memory import Memory
from megatron_mux.split.wire import RefusedError

_MIB = 1 << 20


@dataclass(frozen=True)
class _Claim:
    """What a session has been promised: bytes that it may hold while it waits, and of its largest request beside."""

    standing: int
    most: int


class Room:
    """Memory that sessions have been promised.

    A session may hold `Memory.standing` while it waits for the memory of its next request. If all sessions' fits beside
    the largest request of any of them, then each request can run once those before it have ended. Graphs that policies
    keep need not be counted: their backward passes wait for no memory, and free them.

    Args:
        capacity: Bytes.
        shared: Whether sessions share memory. If whole tasks are moved out to make room for others, each must fit by
            itself.
        own: Bytes of parameters that each session has for itself.
    """

    def __init__(self, capacity: int, shared: bool = True, own: int = 0) -> None:
        self._capacity = capacity
        self._shared = shared
        self._own = own
        self._claims: dict[str, _Claim] = {}

    def claim(self, name: str, memory: Memory, rows: int) -> None:
        """Promise a session its memory, in place of what it was promised before.

        Args:
            name: Of the session.
            memory: What it takes.
            rows: Of its largest request, which may be an evaluation's.

        Raises:
            RefusedError: It does not fit, `too_large` not even alone; it is then promised nothing.
        """
        self._claims.pop(name, None)
        asked = _Claim(memory.standing + self._own, memory.most(rows))
        if asked.standing + asked.most > self._capacity:
            raise RefusedError(
                "too_large",
                f"its adapter ({memory.lasting / _MIB:.0f} MiB) and a request of {memory.rows} tokens with a backward "
                f"pass, or {rows} without, need {(asked.standing + asked.most) / _MIB:.0f} MiB, and the server has "
                f"{self._capacity / _MIB:.0f} MiB beside its weights: use smaller batches, for training "
                "(gradient_accumulation_steps) and for evaluation",
            )
        all_claims = [asked, *(self._claims.values() if self._shared else ())]
        needed = sum(one.standing for one in all_claims) + max(one.most for one in all_claims)
        if needed > self._capacity:
            raise RefusedError(
                "full",
                f"{len(self._claims)} sessions use the server's memory: with one more they could need "
                f"{needed / _MIB:.0f} MiB, and there are {self._capacity / _MIB:.0f} MiB beside the weights",
                retry=True,
            )
        self._claims[name] = asked

    def leave(self, name: str) -> None:
        """Take back what a session was promised, if anything."""
        self._claims.pop(name, None)
