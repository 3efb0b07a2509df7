"""One client's stream on the server: receives messages within limits, answers heartbeats, sends."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Any

import grpc.aio

from megatron_mux.split.protocol.framing import Assembly, frames
from megatron_mux.split.protocol.messages import Message
from megatron_mux.split.protocol.wire import Header, Kind, Limits, RefusedError, WireError
from megatron_mux.split.server.bytes_in_flight import BytesInFlight

_SECONDS_OF_A_FRAME = 30
"""Longest time between two frames of a message, in each direction: a client that stalls holds memory meanwhile."""
_SECONDS_OF_HEARTBEAT = 5
_JSON_READ_AT_ONCE = 64 << 10
"""Bytes of JSON that are read on the event loop; more is read in a thread."""
_SECONDS_OF_FIRST = 30
"""Longest time until a stream's first message, PINGs aside."""


class ClientStreams:
    """What the streams of one client share.

    Args:
        most: Bytes in flight that they may have together.

    Attributes:
        count: How many there are.
        turn: Held while a message is being received: streams take turns, so that those of a client that stalls in the
            middle of messages hold the memory of one message only.
        in_flight: Bytes in flight, of which all clients together have only so many.
    """

    def __init__(self, most: int) -> None:
        self.count = 0
        self.turn = asyncio.Lock()
        self.in_flight = BytesInFlight(most)


class ServerStream:
    """A client's messages, in order. PING is answered before it gets to whoever iterates.

    Args:
        context: gRPC's, of the stream.
        limits: What the client may send at first.
        in_flight: Bytes that all streams share.
        client: What this client's streams share.

    Attributes:
        limits: What the client may send from now on; set it when a session's sizes are agreed.
    """

    def __init__(self, context: Any, limits: Limits, in_flight: BytesInFlight, client: ClientStreams) -> None:
        self._context = context
        self.limits = limits
        self._in_flight = in_flight
        self._client = client
        self._answered = -math.inf  # when the last PING was
        self._queue: asyncio.Queue[tuple[Header, Assembly] | None] = asyncio.Queue(1)
        self._taken = self._shared = (
            0  # bytes in flight of this stream: of its client's, and of all clients',
        )
        self._handled = 0  # and of these, of the message that the handler has
        self._receiving = False
        self._sending = asyncio.Lock()
        self._stuck = False

    def __aiter__(self) -> ServerStream:
        return self

    async def __anext__(self) -> Message:
        """The next message. The memory of the one before counts as free from now on.

        Raises:
            RefusedError: Its content is not what its kind has; raised here, where refusals are counted and logged.
        """
        self._give(self._handled, self._handled)
        self._handled = 0
        item = await self._queue.get()
        if item is None:
            self._queue.put_nowait(None)  # for whoever asks again
            raise StopAsyncIteration
        header, assembly = item
        self._handled = header.memory
        if header.json_bytes > _JSON_READ_AT_ONCE:
            return await asyncio.to_thread(assembly.message, self.limits)
        return assembly.message(self.limits)

    async def receive_all(self) -> None:
        """Receive messages until the client ends the stream.

        Raises:
            RefusedError: The client breaks the protocol or the limits, or stalls in the middle of a message.
        """
        until: float | None = time.monotonic() + _SECONDS_OF_FIRST
        while (frame := await self._before(until)) is not None:
            header = Header.read(frame)
            until = until if header.kind is Kind.PING else None
            if header.kind is Kind.PING:
                Assembly(header).add(frame)
                if (
                    now := time.monotonic()
                ) >= self._answered + _SECONDS_OF_HEARTBEAT / 5:  # one of several at once
                    self._answered = now
                    await self.send(replace(_PONG, session=header.session))
                continue
            header.check(self.limits)
            self._receiving = True
            assembly = await self._receive(header, frame)
            await self._queue.put((header, assembly))
            self._receiving = False
        await self._queue.put(None)

    async def _receive(self, header: Header, frame: bytes) -> Assembly:
        size = header.memory
        held = self._client.in_flight
        if size > held.most:
            raise WireError(
                "size",
                f"{header.kind.name} takes {size} bytes; a client may have {held.most} in flight, a quarter of the "
                "server's --max-bytes-in-flight.",
            )
        async with self._client.turn:
            await held.take(size)
            self._taken += size
            await self._in_flight.take(size)
            self._shared += size
            assembly = Assembly(header)
            while not assembly.add(frame):
                frame = await self._next_frame()
        return assembly

    async def _before(self, until: float | None) -> bytes | None:
        """The next frame, if it begins a message by then."""
        try:
            async with asyncio.timeout(None if until is None else until - time.monotonic()):
                return await self._read()
        except TimeoutError:
            raise RefusedError("slow", f"No HELLO came in {_SECONDS_OF_FIRST} s.", retry=True) from None

    async def _read(self) -> bytes | None:
        frame: bytes = await self._context.read()
        if frame is grpc.aio.EOF:
            return None
        self._in_flight.received += len(frame)
        return frame

    async def _next_frame(self) -> bytes:
        try:
            async with asyncio.timeout(_SECONDS_OF_A_FRAME):
                frame = await self._read()
        except TimeoutError:
            raise _slow("sent") from None
        if frame is None:
            raise WireError("frame", "The stream ended in the middle of a message.", retry=True)
        return frame

    async def show_life(self) -> None:
        """Send PONG every few seconds while a message is being received or waits: a PING behind it is not read."""
        while True:
            await asyncio.sleep(_SECONDS_OF_HEARTBEAT)
            if self._receiving:
                await self.send(_PONG)

    async def send(self, message: Message) -> None:
        """Send a message. One that has begun is sent whole even if the caller is cancelled, so that others may follow.

        Raises:
            RefusedError: The client does not read.
        """
        sending = asyncio.create_task(self._send(message))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(sending)

    async def _send(self, message: Message) -> None:
        parts = frames(message)
        async with self._sending:
            for frame in parts:
                if self._stuck:
                    return
                try:
                    async with asyncio.timeout(_SECONDS_OF_A_FRAME):
                        await self._context.write(frame)
                    self._in_flight.sent += len(frame)
                except TimeoutError:
                    self._stuck = True
                    raise _slow("read") from None

    def release(self) -> None:
        """Give back the stream's bytes in flight, once it is over."""
        self._give(self._taken, self._shared)

    def _give(self, taken: int, shared: int) -> None:
        self._taken, self._shared = self._taken - taken, self._shared - shared
        self._client.in_flight.give(taken)
        self._in_flight.give(shared)


_PONG = Message(Kind.PONG)


def _slow(verb: str) -> RefusedError:
    text = f"The client {verb} nothing for {_SECONDS_OF_A_FRAME} s in the middle of a message."
    return RefusedError("slow", text, retry=True)
