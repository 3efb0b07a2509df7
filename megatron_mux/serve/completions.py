"""The server's end of chat completions: which instance gets one, and what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import select

from megatron_mux.serve.channel.hub import Hub
from megatron_mux.serve.channel.messages import Broken, Complete, Piece
from megatron_mux.serve.database.store import Store
from megatron_mux.serve.database.tables import Instance

_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass
class Completions:
    """Has instances continue conversations.

    Attributes:
        hub: Of the instances.
        store: Says which instances are ready.
        want: Told each backbone that is asked for. Called in the event loop.
        wake: Tells the dispatcher that a backbone has no instance.
        seconds_to_wait: For an instance.
        seconds_of_silence: After which it is said that nothing has come.
    """

    hub: Hub
    store: Store
    want: Callable[[str], None]
    wake: Callable[[], None]
    seconds_to_wait: float = 60.0
    seconds_of_silence: float = 15.0

    async def pieces(self, backbone: str, asked: Complete) -> AsyncGenerator[Piece | Broken | None, None]:
        """Yield what comes of a completion, and None whenever nothing has come for long; `Broken` is the last one.

        Whoever closes the generator earlier abandons the completion.
        """
        instance = await self._instance(backbone)
        if instance is None:
            text = f"No instance has {backbone} at the moment: try again later."
            yield Broken(id=asked.id, message=text, code="no_instance")
            return
        queue, left = self.hub.complete(instance, asked), asked.choices
        try:
            while left:
                piece = None
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.seconds_of_silence):
                        piece = await queue.get()
                yield piece
                if isinstance(piece, Broken):
                    return
                if piece is not None and piece.finish is not None:
                    left -= 1
        finally:
            self.hub.abandon(instance, asked.id)

    async def _instance(self, backbone: str) -> str | None:
        """The connected instance with the fewest completions, waiting for one; None: there was none in time."""
        self.want(backbone)
        deadline = time.monotonic() + self.seconds_to_wait
        found = await self._connected(backbone)
        if not found:
            self.wake()
        while not found and time.monotonic() < deadline:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            found = await self._connected(backbone)
        return min(found, key=lambda name: len(self.hub.peers[name].completions), default=None)

    async def _connected(self, backbone: str) -> Sequence[str]:
        def ready() -> Sequence[str]:
            with self.store.read() as session:
                query = select(Instance.name).where(Instance.backbone == backbone, Instance.state == "ready")
                return session.scalars(query).all()

        return [name for name in await asyncio.to_thread(ready) if name in self.hub.peers]
