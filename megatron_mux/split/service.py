"""The server's end of the wire: a gRPC service that hands each client's messages to a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_mux.split.wire import Limits, Message

Send = Callable[[Message], Awaitable[None]]


class Incoming(AsyncIterator[Message], Protocol):
    """A client's messages, in order; PING is answered before it gets here.

    Attributes:
        limits: What the client may send from now on; set it when a session's sizes are agreed.
    """

    limits: Limits


class Handler(Protocol):
    """What a server does with its clients' messages."""

    def limits(self, identity: str) -> Limits:
        """What a client may send before it has joined.

        Args:
            identity: Common name of the client's verified certificate.
        """
        ...

    async def session(self, identity: str, incoming: Incoming, send: Send) -> None:
        """Serve one stream until its client ends it; the stream ends when this returns.

        A `RefusedError`, such as the `WireError` that `incoming` may raise, is sent as ERROR and ends the stream.

        Args:
            identity: Common name of the client's verified certificate.
            incoming: The client's messages.
            send: Sends a message to the client; waits while the client is slow to read.

        Raises:
            asyncio.CancelledError: The client is gone, its stream was refused, or the service stops.
        """
        ...


@dataclass(frozen=True)
class ServerTls:
    """Files of the server's TLS: its certificate and key, and the CA that signs its clients' certificates."""

    certificate: Path
    key: Path
    client_ca: Path


class Service:
    """Serves streams of clients.

    Args:
        handler: Serves each stream.
        address: `HOST:PORT` to listen on; port 0 takes a free one.
        tls: Files of the server; None (tests only, on 127.0.0.1): no encryption, and every client is called `local`.
        max_bytes_in_flight: Most bytes of requests of all streams that are being received or handled.

    Attributes:
        port: The port, once started.
    """

    port: int

    def __init__(
        self, handler: Handler, address: str, tls: ServerTls | None, max_bytes_in_flight: int = 1 << 30
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Listen.

        Raises:
            UserError: The address is taken or the files are unusable.
        """
        raise NotImplementedError

    async def stop(self, grace: float) -> None:
        """Accept no more streams, and cancel those that have not ended after `grace` seconds."""
        raise NotImplementedError
