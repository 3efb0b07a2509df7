"""Lines of JSON between rank 0 and each other rank, on connections of their own.

Not over the process groups, in whose operations ranks get stuck, nor over torch's store: a connection that closes
shows at once that a process is gone, however it ended.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

Message = dict[str, Any]

_SECONDS_TO_SEND = 5.0
"""Longest time to send a message: it is far smaller than a connection's buffer, so a slower receiver reads nothing."""

_LONGEST = 1 << 16
"""Most bytes of a message."""

_MOST_RANKS = 4096
"""Ranks that may connect at once."""


class Link:
    """One end of a connection.

    Args:
        connection: The connected socket.

    Attributes:
        closed: Whether the other end is gone, or this one was closed.
        heard: When something was received last, by the monotonic clock.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SECONDS_TO_SEND)
        self.socket = connection
        self.closed = False
        self.heard = time.monotonic()
        self._begun = b""

    def send(self, message: Message) -> None:
        """Send a message, unless the other end is gone."""
        if self.closed:
            return
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[Message]:
        """Messages received; called when the socket is ready, also because the other end has closed.

        Raises:
            ValueError: Something else than a message was received.
        """
        try:
            came = self.socket.recv(1 << 16)
        except OSError:
            came = b""
        if not came:
            self.closed = True
            return []
        self.heard = time.monotonic()
        *lines, self._begun = (self._begun + came).split(b"\n")
        if len(self._begun) > _LONGEST:
            raise ValueError("not a message")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a message")
        return messages

    def say_no_more(self) -> None:
        """Close one direction: the other end receives what was sent, then the end."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.closed = True

    def close(self) -> None:
        """Close both directions."""
        self.closed = True
        self.socket.close()


def listen() -> socket.socket:
    """A socket on a free port, reachable from other hosts."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MOST_RANKS
        )
    else:
        listener = socket.create_server(("", 0), backlog=_MOST_RANKS)
    listener.setblocking(False)
    return listener


def ready(sockets: Iterable[socket.socket], seconds: float) -> list[socket.socket]:
    """The sockets that can be read, after at most `seconds`; at once if there is one.

    Args:
        sockets: Open sockets.
        seconds: Longest time to wait; 0: not at all.
    """
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        found = [key.fileobj for key, _ in selector.select(max(0.0, seconds))]
    return [one for one in found if isinstance(one, socket.socket)]
