"""The client's end of the wire: blocking calls over a stream that is made anew when it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.split.wire import Limits, Message

Exchange = Callable[[Message], Message]
"""Sends a request on a new stream and returns its reply."""


@dataclass(frozen=True)
class ClientTls:
    """Files of a client's TLS.

    Attributes:
        ca: The CA that signed the server's certificate.
        certificate: The client's certificate; its common name is the client's identity.
        key: Its private key.
        server_name: Name in the server's certificate, if the address has another.
    """

    ca: Path
    certificate: Path
    key: Path
    server_name: str | None = None


class DeadlineError(UserError):
    """The reply to a request did not come in time."""


class Transport:
    """A client's connection to a server. Connects at the first call; one call at a time.

    Args:
        address: `HOST:PORT` of the server.
        tls: Files of the client; None (tests only): no encryption.
        limits: What the server may send before the client has joined.
        retry_seconds: How long to try to connect.
        say: Shows a line to the user.

    Attributes:
        limits: What the server may send from now on; set it when sizes are agreed.
        on_reconnect: Called with the new stream's `Exchange` whenever a stream has been made anew, before the
            outstanding request is sent again: it sends HELLO. None until the client has joined.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        limits: Limits,
        retry_seconds: float = 60,
        say: Callable[[str], None] = print,
    ) -> None:
        raise NotImplementedError

    on_reconnect: Callable[[Exchange], None] | None
    limits: Limits

    def call(self, message: Message, deadline_s: float) -> Message:
        """Send a request and wait for its reply; after a broken stream, the identical request is sent again.

        Raises:
            RefusedError: The server answered with ERROR, and not to try again.
            WireError: The reply breaks the protocol or `limits`.
            DeadlineError: No reply within `deadline_s` seconds; the server is told to drop the request.
            UserError: The server cannot be reached, or one end refuses the other's certificate.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the stream and close the connection."""
        raise NotImplementedError
