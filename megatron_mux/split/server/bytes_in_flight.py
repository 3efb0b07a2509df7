"""A bound on the memory of messages in flight, over all streams of a server."""

from __future__ import annotations

import asyncio
from collections import deque


class BytesInFlight:
    """Bytes that streams take before they receive a message, first come first served, and counts of those transferred.

    Args:
        most: Number of bytes that may be taken at a time.

    Attributes:
        most: See above.
        free: Bytes that nobody has.
        received: Bytes of all frames that were received.
        sent: Bytes of all frames that were sent.
    """

    def __init__(self, most: int) -> None:
        self.most = self.free = most
        self.received = self.sent = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> None:
        """Take bytes, once they are free and whoever asked before has been served; at most `most`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((size, future))
        self._serve()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # served just before
                self.give(size)
            self._serve()  # others may have waited behind this one
            raise

    def give(self, size: int) -> None:
        """Give bytes back."""
        self.free += size
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            size, future = self._waiting[0]
            if not future.cancelled():
                if size > self.free:
                    return
                self.free -= size
                future.set_result(None)
            self._waiting.popleft()
