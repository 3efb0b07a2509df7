"""The endpoints of the watch: rank 0 receives every rank's state and decides; the others send theirs and obey.

They have connections of their own: not the process groups, in whose operations ranks get stuck, nor torch's store. A
connection that closes shows at once that a process is gone, however it ended.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron_mux.liveness.heartbeat import State
from megatron_mux.liveness.verdict import FailureDetector, RankView, Verdict, gone_text, silent_text

_SECONDS_TO_CONNECT = 60.0
_SECONDS_TO_LEAVE = 2.0

_SECONDS_TO_SEND = 5
"""Longest time to send or receive a message that has begun: it is far smaller than a connection's buffer."""

_LONGEST_GREETING = 1 << 12
_MOST_RANKS = 4096
"""Ranks that may connect at once."""


class Channel:
    """One end of a connection, on which objects are sent.

    Attributes:
        closed: Whether the other end is gone, or this one was closed.
        heard: When something was received last, by the monotonic clock.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _SECONDS_TO_SEND, 0))
        self.connection = Connection(connected.detach())
        self.closed = False
        self.heard = time.monotonic()

    def send(self, message: object) -> None:
        """Send a message; that the other end is gone shows in receiving, after what it has sent last."""
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """The next message, once there is one; None if the other end has closed instead."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.closed = True
            return None
        self.heard = time.monotonic()
        return message

    def close(self) -> None:
        """Close it."""
        self.closed = True
        self.connection.close()


class Endpoint(ABC):
    """One end of the watch.

    Attributes:
        over: Whether rank 0 has finished its work: then nobody watches any longer.
        channels: To other ranks, by rank.
    """

    def __init__(self, detector: FailureDetector) -> None:
        self.over = False
        self.channels: dict[int, Channel] = {}
        self._detector = detector
        self._bell, self._button = Pipe(duplex=False)

    def exchange(self, state: State, until: float) -> Verdict | None:
        """One beat: send, then receive until a moment of the monotonic clock, or until there is a verdict.

        Args:
            state: This rank's. One that has left does not receive.
            until: When the next beat is due.

        Returns:
            Why to stop, if there is a reason.
        """
        beat = self._beat(state)
        for channel in self._open():
            channel.send(beat)
        now = time.monotonic()
        while now < until and not state.end:
            found = wait([self._bell, *(channel.connection for channel in self._open())], until - now)
            for rank, channel in self.channels.items():
                if channel.connection in found and (message := channel.receive()) is not None:
                    self._take(rank, message)
            # The time before it received: had this thread been held up since, messages could be waiting.
            verdict = self._judge(now)
            if verdict is not None or self.over or self._bell in found:
                return verdict
            now = time.monotonic()
        return self._judge(now) if state.end else None

    def wake(self) -> None:
        """Let `exchange`, called by another thread, return."""
        self._button.send(None)

    def leave(self, verdict: Verdict | None) -> None:
        """Close; rank 0 tells every other rank of the end before.

        Args:
            verdict: Why all have to stop; None: this rank has finished its work.
        """
        for channel in self.channels.values():
            channel.close()

    def _open(self) -> list[Channel]:
        return [channel for channel in self.channels.values() if not channel.closed]

    @abstractmethod
    def _beat(self, state: State) -> object:
        """What the other end, or ends, are told of this rank's state."""

    @abstractmethod
    def _take(self, rank: int, message: Any) -> None:
        """Note what a rank has told."""

    @abstractmethod
    def _judge(self, now: float) -> Verdict | None:
        """The reason to stop, by what has been received until now."""


class Hub(Endpoint):
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
        super().__init__(detector)
        self._names = [name, *(f"rank {rank}" for rank in range(1, world_size))]
        self._states = [state] * world_size
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=_MOST_RANKS, dualstack_ipv6=dual
        )
        self.address = (int(self._listener.getsockname()[1]), secrets.token_hex())

    def accept(self) -> None:
        """Wait until every other rank has made its `Spoke`; whoever does not know the password is put out.

        Raises:
            OSError: A rank did not connect in time.
        """
        until = time.monotonic() + _SECONDS_TO_CONNECT
        with self._listener:
            while len(self.channels) < len(self._names) - 1:
                self._listener.settimeout(max(0.1, until - time.monotonic()))
                channel = Channel(self._listener.accept()[0])
                try:
                    self._greet(channel)
                except (ValueError, TypeError, IndexError, EOFError, OSError):
                    channel.close()  # not one of our ranks

    def _greet(self, channel: Channel) -> None:
        password, rank, name = json.loads(channel.connection.recv_bytes(_LONGEST_GREETING))
        if not hmac.compare_digest(str(password), self.address[1]):
            raise ValueError("a stranger")
        self._names[rank], self.channels[rank] = name, channel

    def leave(self, verdict: Verdict | None) -> None:
        """See `Endpoint`."""
        here = not self._states[0].end
        for channel in self._open():
            channel.send(True if verdict is None else replace(verdict, said=here))
        # Closing with unread input would reset the connection and lose what was sent: wait until the others close.
        until = time.monotonic() + _SECONDS_TO_LEAVE
        while (waiting := self._open()) and time.monotonic() < until:
            found = wait([channel.connection for channel in waiting], until - time.monotonic())
            for channel in waiting:
                if channel.connection in found:
                    channel.receive()
        super().leave(verdict)

    def _beat(self, state: State) -> object:
        self._states[0] = state
        return False

    def _take(self, rank: int, message: Any) -> None:
        self._states[rank] = message

    def _judge(self, now: float) -> Verdict | None:
        ranks = [RankView(name, state) for name, state in zip(self._names, self._states, strict=True)]
        for rank, channel in self.channels.items():
            ranks[rank] = replace(ranks[rank], silent=now - channel.heard, closed=channel.closed)
        return self._detector(ranks)


class Spoke(Endpoint):
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
        super().__init__(detector)
        port, password = address
        self._hub = hub
        self._verdict: Verdict | None = None
        # torchrun and its like name rank 0's host to every process.
        host = os.environ.get("MASTER_ADDR", "localhost")
        channel = self.channels[0] = Channel(
            socket.create_connection((host, port), timeout=_SECONDS_TO_CONNECT)
        )
        channel.connection.send_bytes(json.dumps([password, rank, name]).encode())

    def _beat(self, state: State) -> object:
        return state

    def _take(self, rank: int, message: Any) -> None:
        if isinstance(message, Verdict):
            self._verdict = message
        self.over = self.over or message is True

    def _judge(self, now: float) -> Verdict | None:
        if self._verdict is not None or self.over:
            return self._verdict
        if self.channels[0].closed:
            return Verdict(0, gone_text([self._hub]))
        if now - self.channels[0].heard >= self._detector.max_silence:
            return Verdict(0, silent_text([self._hub], self._detector.max_silence))
        return None
