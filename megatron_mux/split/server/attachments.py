"""Puts sessions' adapters onto the body together with the memory that they hold, and takes both away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server.admission import AdmissionController
from megatron_mux.split.server.body import Body
from megatron_mux.split.server.dispatcher import Dispatcher, Work
from megatron_mux.split.server.session_compute import attach
from megatron_mux.split.server.session_memory import Memory
from megatron_mux.split.server.store import SessionStore

JOIN_COST = 5
"""What joining costs a client, in its largest requests: for shares and rate limits."""


class Background:
    """Tasks that go on when their caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task; it ends although nobody waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Attachments:
    """What sessions have on the body: an adapter, a reservation of what lasts, and what `AdmissionController` promised.

    A session gets all of it or nothing, whenever its client's connection breaks.

    Args:
        background: For what must not be cancelled.
        share: Part of the memory that sessions of one client may have.
    """

    def __init__(
        self,
        body: Body,
        dispatcher: Dispatcher,
        store: SessionStore,
        background: Background,
        log: logging.Logger,
        share: float,
    ) -> None:
        self._body = body
        self._dispatcher = dispatcher
        self._store = store
        self._background = background
        self._log = log
        self._admission = AdmissionController(dispatcher.scheduler.capacity, share)

    async def attach(
        self, name: str, identity: str, proposal: Proposal, layers: range, memory: Memory
    ) -> int:
        """Attach a session's adapter as of the step that its client is at.

        Returns:
            The reservation of what lasts.

        Raises:
            RefusedError: It does not fit, or the server lacks the step.
        """
        saves = f"{name}/{proposal.run}"
        saved = await self._saved(saves, proposal.step)
        try:
            if not proposal.step:
                self._store.reserve(saves)
            self._admission.claim(name, memory, proposal.rows)
            reservation = await self._add(name, identity, proposal, layers, memory, saved)
            if not proposal.step:
                try:
                    self._store.forget(saves)
                except OSError as error:
                    taken_off = self._background.start(self._take_off(name, identity, reservation))
                    await asyncio.shield(taken_off)
                    why = f"the server could not remove saves: {error.strerror}"
                    raise RefusedError("disk", why) from None
        except BaseException:
            self._leave(name, saves)
            raise
        return reservation

    async def detach(self, name: str, identity: str, run: str, reservation: int) -> None:
        """Take a session's adapter off between computations, and end its reservation."""
        self._leave(name, f"{name}/{run}")
        await self._take_off(name, identity, reservation)

    def _leave(self, name: str, saves: str) -> None:
        self._admission.leave(name)
        self._store.tidy(saves)

    async def _saved(self, saves: str, step: int) -> Sequence[Piece]:
        """The state of the step that a client is at; nothing at its beginning."""
        if not step:
            return ()
        try:
            saved = await asyncio.to_thread(self._store.load, saves, step)
        except UserError as error:
            self._log.error("damaged save", extra={"fields": {"saves": saves, "why": str(error)}})
            saved = None
        if saved is None:
            have = ", ".join(map(str, self._store.steps(saves))) or "none"
            raise RefusedError("no_state", f"the server has no save of step {step} (it has: {have})")
        return saved

    async def _add(
        self,
        name: str,
        identity: str,
        proposal: Proposal,
        layers: range,
        memory: Memory,
        saved: Sequence[Piece],
    ) -> int:
        def join(works: Sequence[Work]) -> list[None]:
            attach(self._body, name, proposal, layers, saved)
            return [None]

        cost = JOIN_COST * proposal.train_rows
        work = Work(identity, join, size=memory.lasting, keeps=memory.lasting, tokens=cost)
        try:
            return (await self._dispatcher.compute(work)).reservation
        except UserError as error:
            if isinstance(error, RefusedError):
                raise
            raise RefusedError("proposal", str(error)) from None
        except asyncio.CancelledError:
            if work.abandoned:  # it is being computed: what it attaches is removed behind it
                self._background.start(self._take_off(name, identity, 0))
            raise

    async def _take_off(self, name: str, identity: str, reservation: int) -> None:
        def remove(works: Sequence[Work]) -> list[None]:
            if self._body.has(name):
                self._body.remove(name)
            return [None]

        await self._dispatcher.compute(Work(identity, remove))
        self._dispatcher.release(reservation)
