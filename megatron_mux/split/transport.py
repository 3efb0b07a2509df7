"""The client's end of the wire: blocking calls over a stream that is made anew when it breaks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from megatron_mux.errors import UserError
from megatron_mux.split.client_stream import BrokenError, ClientStream
from megatron_mux.split.client_stream import DeadlineError as DeadlineError
from megatron_mux.split.tls import ClientTls as ClientTls
from megatron_mux.split.tls import probe
from megatron_mux.split.wire import Limits, Message, RefusedError

Exchange = Callable[[Message], Message]
"""Sends a request on a new stream and returns its reply."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class Transport:
    """A client's connection to a server. Connects at the first call; one call at a time.

    Args:
        address: `HOST:PORT` of the server.
        tls: Files of the client; None (tests only): no encryption.
        limits: What the server may send before the client has joined.
        retry_seconds: How long to try to reach a server.
        say: Shows a line to the user.

    Attributes:
        limits: What the server may send from now on; set it when sizes are agreed.
        on_reconnect: Called with the `Exchange` of each new stream, before anything else is sent on it: it sends HELLO.
            None until the client has joined.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        limits: Limits,
        retry_seconds: float = 60,
        say: Callable[[str], None] = print,
    ) -> None:
        self.limits = limits
        self.on_reconnect: Callable[[Exchange], None] | None = None
        self._address = address
        self._tls = tls
        self._retry_seconds = retry_seconds
        self._say = say
        self._stream: ClientStream | None = None

    def call(self, message: Message, deadline_s: float) -> Message:
        """Send a request and wait for its reply; after a broken stream, the identical request is sent again.

        Args:
            message: The request; its tensors must not change meanwhile.
            deadline_s: Longest time until the reply, reconnecting included.

        Raises:
            RefusedError: The server answered with ERROR, and not to try again.
            WireError: The reply breaks the protocol or `limits`.
            DeadlineError: No reply came in time; the server is told to drop the request.
            UserError: The server cannot be reached, or one end refuses the other's certificate.
        """
        until = time.monotonic() + deadline_s
        pauses = _pauses()
        lost = ""
        while True:
            try:
                stream = self._stream or self._connect(until, lost)
                return stream.exchange(message, until)
            except BaseException as error:
                self._drop()
                again = isinstance(error, BrokenError) or (isinstance(error, RefusedError) and error.retry)
                if not again or time.monotonic() >= until:
                    raise
                lost = str(error)
            time.sleep(max(0.0, min(next(pauses), until - time.monotonic())))

    def _connect(self, until: float, lost: str) -> ClientStream:
        """Make a stream, on which the client has joined again."""
        give_up = min(time.monotonic() + self._retry_seconds, until)
        if lost:
            self._say(f"lost the connection to {self._address} ({lost}); connecting again")
        told = bool(lost)
        for pause in _pauses():
            try:
                probe(self._address, self._tls)
                break
            except OSError as error:
                reason = error.strerror or str(error)
            if time.monotonic() + pause > give_up:
                raise UserError(
                    f"The server at {self._address} could not be reached for {self._retry_seconds:.0f} s ({reason}). "
                    "Start it, or check the address."
                )
            if not told:
                self._say(f"waiting for the server at {self._address} ({reason})")
            told = True
            time.sleep(pause)
        self._stream = ClientStream(self._address, self._tls, lambda: self.limits)
        if self.on_reconnect is not None:
            stream = self._stream
            self.on_reconnect(lambda message: stream.exchange(message, until))
        if told:
            self._say(f"connected to {self._address}")
        return self._stream

    def close(self) -> None:
        """End the stream and close the connection."""
        self._drop(abruptly=False)

    def _drop(self, abruptly: bool = True) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close(abruptly)


def _pauses() -> Iterator[float]:
    """Seconds between attempts: they double, and differ between clients, lest all come back at once."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.5)
        pause = min(2 * pause, _LONGEST_PAUSE)
