"""The client's end of the wire: blocking calls over a stream that is made anew when it breaks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from megatron_mux.errors import UserError
from megatron_mux.split.client.stream import BrokenError, ClientStream
from megatron_mux.split.protocol.messages import Message
from megatron_mux.split.protocol.wire import Limits, RefusedError
from megatron_mux.split.tls import ClientTls as ClientTls
from megatron_mux.split.tls import probe

Exchange = Callable[[Message], Message]
"""Sends a request on a new stream and returns its reply."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class DeadlineError(UserError):
    """The reply to a request did not come in time."""


class Transport:
    """A client's connection to a server. Connects at the first call; one call at a time.

    Args:
        address: `HOST:PORT` of the server.
        tls: Files of the client; None (tests only): no encryption.
        limits: What the server may send before the client has joined.
        retry_seconds: How long to try to reach a server.
        restart_seconds: The same for one that said it would stop: it may be started again.
        say: Shows a line to the user.

    Attributes:
        limits: What the server may send from now on; set it when sizes are agreed.
        on_reconnect: Called with the `Exchange` of each new stream, before anything else is sent on it: it sends HELLO.
            None until the client has joined.
        gives_up: Asked while there is no server: whether to stop waiting.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTls | None,
        limits: Limits,
        retry_seconds: float = 60,
        restart_seconds: float = 600,
        say: Callable[[str], None] = print,
    ) -> None:
        self.limits = limits
        self.on_reconnect: Callable[[Exchange], None] | None = None
        self._address = address
        self._tls = tls
        self._retry_seconds = retry_seconds
        self._restart_seconds = restart_seconds
        self.gives_up: Callable[[], bool] | None = None
        self._stops = False  # whether the server said so
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
        failure: BaseException | None = None
        for pause in _pauses():
            try:
                stream = self._stream or self._connect(until, failure)
                reply = stream.exchange(message, until)
                self._stops = False
                return reply
            except BaseException as error:
                self._drop()
                if not _is_worth_another_try(error):
                    raise
                failure = error if str(error) or failure is None else failure
                if isinstance(error, RefusedError) and error.code == "draining":
                    until = time.monotonic() + self._restart_seconds
                    self._note_stop()
            left = until - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
        what = f"{message.kind.name} {message.operation} of step {message.step}"
        reason = f" ({failure})" if failure is not None and str(failure) else ""
        raise DeadlineError(
            f"The server at {self._address} did not answer {what} in {deadline_s:g} s{reason}."
        )

    def _note_stop(self) -> None:
        if not self._stops:
            wait = f"waiting up to {self._restart_seconds / 60:.0f} minutes for it to be started again"
            self._say(f"{self._address} stops; {wait}")
        self._stops = True

    def _connect(self, until: float, failure: BaseException | None) -> ClientStream:
        """Make a stream, on which the client has joined again if it had joined."""
        if isinstance(failure, RefusedError) and not self._stops:
            self._say(f"{self._address} refuses for now: {failure}; trying again")
        elif failure is not None and not self._stops:
            self._say(f"lost the connection to {self._address} ({failure}); connecting again")
        waited = self._wait_for_server(until, failure is not None)
        stream = self._stream = ClientStream(self._address, self._tls, lambda: self.limits)
        if self.on_reconnect is not None:
            self.on_reconnect(lambda message: stream.exchange(message, until))
        if waited or (failure is not None and not self._stops):
            self._say(f"connected to {self._address}")
        return stream

    def _wait_for_server(self, until: float, told: bool) -> bool:
        """Try until a server is there; returns whether the first attempt failed."""
        began = time.monotonic()
        give_up = until if self._stops else min(began + self._retry_seconds, until)
        for attempt, pause in enumerate(_pauses()):
            try:
                probe(self._address, self._tls)
                return attempt > 0
            except OSError as error:
                reason = error.strerror or str(error)
            now = time.monotonic()
            if now + pause > give_up or (self.gives_up is not None and self.gives_up()):
                raise UserError(
                    f"The server at {self._address} could not be reached for {now - began:.0f} s ({reason}). Start it, "
                    "or check the address."
                )
            if attempt == 0 and not told:
                self._say(f"waiting for the server at {self._address} ({reason})")
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    def close(self) -> None:
        """End the stream and close the connection."""
        self._drop(abruptly=False)

    def _drop(self, abruptly: bool = True) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close(abruptly)


def _is_worth_another_try(error: BaseException) -> bool:
    return isinstance(error, (BrokenError, TimeoutError)) or (isinstance(error, RefusedError) and error.retry)


def _pauses() -> Iterator[float]:
    """Seconds between attempts: they double, and differ between clients, lest all come back at once."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.5)
        pause = min(2 * pause, _LONGEST_PAUSE)
