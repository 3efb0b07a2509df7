"""One stream on the client: sends requests and heartbeats, receives replies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

import grpc

from megatron_mux.errors import UserError
from megatron_mux.split.protocol.framing import FRAME_BYTES, Assembly, frames
from megatron_mux.split.protocol.messages import Message, Refusal
from megatron_mux.split.protocol.wire import METHOD, REPLIES, Header, Kind, Limits, RefusedError
from megatron_mux.split.tls import ClientTls, read_files

_SECONDS_OF_HEARTBEAT = 5.0
_SECONDS_OF_SILENCE = 30.0
"""The server answers each heartbeat, so that it is gone, or cannot be reached, if nothing comes for so long."""
_SECONDS_TO_LEAVE = 2.0

_OPTIONS = [
    ("grpc.max_receive_message_length", FRAME_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel knows nothing of earlier failures
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class BrokenError(Exception):
    """The stream is over before a reply came; the same request may be sent on another one."""


class ClientStream:
    """A connection with one stream.

    Args:
        address: `HOST:PORT` of the server.
        tls: Files of the client; None: no encryption.
        limits: Returns what the server may send now.
    """

    def __init__(self, address: str, tls: ClientTls | None, limits: Callable[[], Limits]) -> None:
        self._limits = limits
        self._inbox: SimpleQueue[Message | Exception] = SimpleQueue()
        self._outbox: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._progress = time.monotonic()  # when a frame came, or one of a request went
        self._channel = _channel(address, tls)
        self._call = self._channel.stream_stream(METHOD)(self._requests())
        self._receiver = threading.Thread(target=self._receive_all, name="split replies", daemon=True)
        self._receiver.start()

    def exchange(self, request: Message, until: float) -> Message:
        """Send a request and wait for its reply.

        Args:
            until: The deadline, by the monotonic clock.

        Raises:
            BrokenError: The stream is over, or nothing has been heard for too long.
            TimeoutError: The deadline is over.
            RefusedError: The reply is ERROR, or breaks the protocol.
            UserError: The server refuses the stream for good.
        """
        self._outbox.put(frames(request))
        began = now = time.monotonic()
        while now < until:
            silent = max(began, self._progress) + _SECONDS_OF_SILENCE
            if now >= silent:
                raise BrokenError(f"it was silent for {_SECONDS_OF_SILENCE:.0f} s")
            try:
                reply = self._inbox.get(timeout=min(until, silent) - now)
            except Empty:
                reply = None
            if isinstance(reply, Exception):
                raise reply
            if reply is not None and reply.kind is Kind.ERROR:
                raise _refusal(reply)
            # Anything else is the second reply to an earlier request that arrived twice.
            if reply is not None and _answers(reply, request):
                return reply
            now = time.monotonic()
        raise TimeoutError

    def close(self, abruptly: bool = False) -> None:
        """Close the connection.

        Args:
            abruptly: Cancel what the server still does for this stream; otherwise let it end the stream, for a moment.
        """
        self._outbox.put(None)
        if not abruptly:
            self._receiver.join(_SECONDS_TO_LEAVE)
        self._call.cancel()
        self._channel.close()

    def _requests(self) -> Iterator[bytes]:
        """Frames to send, for gRPC: a heartbeat whenever there has been nothing else to send for a while."""
        while True:
            try:
                parts = self._outbox.get(timeout=_SECONDS_OF_HEARTBEAT)
            except Empty:
                yield from frames(Message(Kind.PING))
                continue
            if parts is None:
                return
            for frame in parts:
                yield frame
                # A large request on a slow link is no silence.
                self._progress = time.monotonic()

    def _receive_all(self) -> None:
        assembly: Assembly | None = None
        try:
            for frame in self._call:
                self._progress = time.monotonic()
                if assembly is None:
                    header = Header.read(frame)
                    limits = self._limits()
                    limits = replace(limits, kinds=limits.kinds | {Kind.PONG, Kind.ERROR})
                    header.check(limits)
                    assembly = Assembly(header)
                if assembly.add(frame):
                    if header.kind is not Kind.PONG:
                        self._inbox.put(assembly.message(limits))
                    assembly = None
            self._inbox.put(BrokenError("the server ended the stream"))
        except grpc.RpcError as error:
            self._inbox.put(_broken(error))
        except Exception as error:  # most often a WireError; the caller gets it
            self._inbox.put(error)


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, _OPTIONS)
    ca, certificate, key = read_files(tls.ca, tls.certificate, tls.key)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.secure_channel(
        address, grpc.ssl_channel_credentials(ca, key, certificate), [*_OPTIONS, *name]
    )


def _answers(reply: Message, request: Message) -> bool:
    return (reply.kind, reply.step, reply.operation) == (
        REPLIES[request.kind],
        request.step,
        request.operation,
    )


def _refusal(reply: Message) -> RefusedError:
    refusal = reply.read(Refusal)
    return RefusedError(refusal.code, refusal.message, refusal.retry)


def _broken(error: Any) -> Exception:
    """What to make of an error of gRPC; almost all of them are of the connection."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UserError("The server does not offer split fine-tuning; check the address.")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return UserError(error.details())
    return BrokenError(error.details() or error.code().name)
