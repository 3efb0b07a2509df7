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
from megatron_mux.split.server.dispatcher import Dispatcher, Outcome, Work
from megatron_mux.split.server.session_compute import Bodies
from megatron_mux.split.server.session_memory import PROFILED_PASSES, Memory
from megatron_mux.split.server.store import SessionStore
from megatron_mux.split.server.swapping import Swapping


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
        bodies: Compute.
        dispatcher: Decides who computes when.
        store: Keeps sessions' states.
        swapping: Moves tasks in and out of memory; None: they share the body.
        background: For what must not be cancelled.
        log: Where events go.
        share: Part of the memory that sessions of one client may have.
    """

    def __init__(
        self,
        bodies: Bodies,
        dispatcher: Dispatcher,
        store: SessionStore,
        swapping: Swapping | None,
        background: Background,
        log: logging.Logger,
        share: float,
    ) -> None:
        self._bodies = bodies
        self._dispatcher = dispatcher
        self._store = store
        self._swapping = swapping
        self._background = background
        self._log = log
        self._admission = AdmissionController(
            dispatcher.scheduler.capacity, swapping is None, bodies.own_parameters, share
        )

    async def attach(
        self, name: str, identity: str, proposal: Proposal, layers: range, need: Memory
    ) -> tuple[Memory, int]:
        """Attach a session's adapter as of the step that its client is at, and measure what its requests need.

        Args:
            name: Of the session.
            identity: Of its client.
            proposal: What the client asks for.
            layers: Of its body.
            need: What it will need by prediction.

        Returns:
            Its memory as measured, and the reservation of what lasts.

        Raises:
            RefusedError: It does not fit, or the server lacks the step.
        """
        saves = f"{name}/{proposal.run}"
        saved = await self._saved(saves, proposal.step)
        try:
            if not proposal.step:
                self._store.reserve(saves)
            self._admission.claim(name, need, proposal.rows)
            outcome = await self._compute(name, identity, proposal, layers, need, saved)
            memory: Memory = outcome.result
            try:
                self._admission.claim(name, memory, proposal.rows)  # now as it was measured
                if not proposal.step:
                    self._store.forget(saves)
            except (RefusedError, OSError) as error:
                await asyncio.shield(
                    self._background.start(self._take_off(name, identity, outcome.reservation))
                )
                if isinstance(error, RefusedError):
                    raise
                raise RefusedError("disk", f"the server could not remove saves: {error.strerror}") from None
        except BaseException:
            self._leave(name, saves)
            raise
        return memory, outcome.reservation

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

    async def _compute(
        self,
        name: str,
        identity: str,
        proposal: Proposal,
        layers: range,
        need: Memory,
        saved: Sequence[Piece],
    ) -> Outcome:
        swapping, size, keeps = self._swapping, need.joining, need.lasting
        if swapping is not None:
            size = keeps = swapping.size(need, proposal.rows)
            await swapping.make_room(size)

        def join(works: Sequence[Work]) -> list[Memory]:
            memory = self._bodies.join(name, proposal, layers, saved)
            if swapping is None:
                works[0].keeps = min(size, memory.lasting)
            return [memory]

        rows = PROFILED_PASSES * proposal.train_rows  # so that joins count for shares and rate limits
        work = Work(identity, join, size=size, keeps=keeps, tokens=rows)
        try:
            return await self._dispatcher.compute(work)
        except UserError as error:
            raise RefusedError("proposal", str(error)) from None
        except asyncio.CancelledError:
            if work.abandoned:  # it is being computed: what it attaches is removed behind it
                self._background.start(self._take_off(name, identity, 0))
            raise

    async def _take_off(self, name: str, identity: str, reservation: int) -> None:
        def remove(works: Sequence[Work]) -> list[None]:
            self._bodies.remove(name)
            return [None]

        await self._dispatcher.compute(Work(identity, remove))
        self._dispatcher.release(reservation)
