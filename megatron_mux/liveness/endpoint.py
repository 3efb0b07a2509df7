"""The endpoints of the watch: rank 0 receives every rank's state and decides; the others send theirs and obey."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from dataclasses import asdict, replace
from typing import Protocol

from megatron_mux.liveness.heartbeat import State
from megatron_mux.liveness.verdict import FailureDetector, RankView, Verdict, gone_text, silent_text
from megatron_mux.liveness.wire import Link, Message, listen, ready

_SECONDS_TO_CONNECT = 60.0
_SECONDS_TO_LEAVE = 2.0


class Endpoint(Protocol):
    """One end of the watch.

    Attributes:
        over: Whether rank 0 has finished its work: then nobody watches any longer.
    """

    over: bool

    def exchange(self, state: State, until: float) -> Verdict | None:
        """One beat: send, then receive until a moment of the monotonic clock, or until there is a verdict.

        Args:
            state: This rank's. One that has left does not receive.
            until: When the next beat is due.

        Returns:
            Why to stop, if there is a reason.
        """
        ...

    def wake(self) -> None:
        """Let `exchange`, called by another thread, return."""
        ...

    def leave(self, verdict: Verdict | None) -> None:
        """Tell every other rank of the end, and close.

        Args:
            verdict: Why all have to stop; None: this rank has finished its work.
        """
        ...


class _Bell:
    """Wakes a thread that waits for sockets."""

    def __init__(self) -> None:
        self.rung, self._button = socket.socketpair()

    def ring(self) -> None:
        self._button.send(b"\n")


class Hub:
    """Rank 0's end.

    Args:
        detector: Decides.
        name: Of rank 0, in messages.
        world_size: Number of ranks.
        state: Rank 0's, and that of each other rank until it sends its own.

    Attributes:
        address: Port and password, for the others.
    """

    def __init__(self, detector: FailureDetector, name: str, world_size: int, state: State) -> None:
        self.over = False
        self._detector = detector
        self._names = [name, *(f"rank {rank}" for rank in range(1, world_size))]
        self._states = [state] * world_size
        self._links: list[Link | None] = [None] * world_size
        self._strangers: list[Link] = []
        self._listener = listen()
        self._password = secrets.token_hex()
        self._bell = _Bell()
        self.address = (int(self._listener.getsockname()[1]), self._password)

    def exchange(self, state: State, until: float) -> Verdict | None:
        """See `Endpoint`."""
        self._states[0] = state
        for link in self._present():
            link.send({})
        now = time.monotonic()
        while now < until and not state.end:
            sockets = {link.socket: link for link in [*self._present(), *self._strangers]}
            found = ready([self._listener, self._bell.rung, *sockets], until - now)
            for one in found:
                if one is self._listener:
                    self._accept()
                elif one in sockets:
                    self._hear(sockets[one])
            # The time before it received: had this thread been held up since, messages could be waiting.
            if verdict := self._detector(self._views(now)):
                return verdict
            if self._bell.rung in found:
                return None
            now = time.monotonic()
        return self._detector(self._views(now)) if state.end else None

    def wake(self) -> None:
        """See `Endpoint`."""
        self._bell.ring()

    def leave(self, verdict: Verdict | None) -> None:
        """See `Endpoint`."""
        last: Message = {"end": True}
        if verdict is not None:
            here = not self._states[0].end
            last = {"verdict": asdict(replace(verdict, said=here))}
        for link in self._present():
            link.send(last)
            link.say_no_more()
        # Closing with unread input would reset the connection and lose what was sent: wait until the others close.
        until = time.monotonic() + _SECONDS_TO_LEAVE
        while (waiting := {link.socket: link for link in self._present()}) and time.monotonic() < until:
            for one in ready(waiting, until - time.monotonic()):
                self._hear(waiting[one])
        self._listener.close()

    def _present(self) -> list[Link]:
        return [link for link in self._links if link is not None and not link.closed]

    def _views(self, now: float) -> list[RankView]:
        return [
            RankView(name, state, now - link.heard, link.closed)
            if link is not None
            else RankView(name, state)
            for name, state, link in zip(self._names, self._states, self._links, strict=True)
        ]

    def _accept(self) -> None:
        try:
            self._strangers.append(Link(self._listener.accept()[0]))
        except OSError:
            pass  # it has closed already

    def _hear(self, link: Link) -> None:
        try:
            for message in link.receive():
                if link in self._strangers:
                    self._greet(link, message)
                else:
                    self._states[self._links.index(link)] = State(**message)
        except (ValueError, TypeError, KeyError, IndexError):
            link.close()  # not one of our ranks
        if link.closed and link in self._strangers:
            self._strangers.remove(link)

    def _greet(self, link: Link, message: Message) -> None:
        if not hmac.compare_digest(str(message["password"]), self._password):
            raise ValueError("a stranger")
        rank = int(message["rank"])
        self._names[rank], self._links[rank] = str(message["name"]), link
        self._strangers.remove(link)


class Spoke:
    """The end of a rank that is not 0.

    Args:
        detector: For its limits.
        rank: This one.
        name: Of this rank, in messages.
        hub: The name of rank 0.
        address: Of `Hub`.

    Raises:
        OSError: Rank 0 cannot be reached.
    """

    def __init__(
        self, detector: FailureDetector, rank: int, name: str, hub: str, address: tuple[int, str]
    ) -> None:
        port, password = address
        self.over = False
        self._detector = detector
        self._hub = hub
        # torchrun and its like name rank 0's host to every process.
        host = os.environ.get("MASTER_ADDR", "localhost")
        self._link = Link(socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT))
        self._link.send({"password": password, "rank": rank, "name": name})
        self._bell = _Bell()

    def exchange(self, state: State, until: float) -> Verdict | None:
        """See `Endpoint`."""
        self._link.send(asdict(state))
        now = time.monotonic()
        while now < until and not state.end:
            found = ready([self._link.socket, self._bell.rung], until - now)
            for message in self._link.receive() if self._link.socket in found else ():
                if "verdict" in message:
                    return Verdict(**message["verdict"])
                self.over = self.over or "end" in message
            if self.over or self._bell.rung in found:
                return None
            if self._link.closed:
                return Verdict(0, gone_text([self._hub]))
            if (
                now - self._link.heard >= self._detector.max_silence
            ):  # the time before it received, as in `Hub`
                return Verdict(0, silent_text([self._hub], self._detector.max_silence))
            now = time.monotonic()
        return None

    def wake(self) -> None:
        """See `Endpoint`."""
        self._bell.ring()

    def leave(self, verdict: Verdict | None) -> None:
        """See `Endpoint`."""
        self._link.close()
