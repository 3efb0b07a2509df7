"""What sessions ask the server for: passes, optimizer steps and saves, planned, scheduled and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.split.protocol.messages import Decision
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server.body import Body, Rows
from megatron_mux.split.server.dispatcher import Dispatcher, Outcome, Work
from megatron_mux.split.server.metrics import Metrics
from megatron_mux.split.server.policies import Circumstances, ForwardPlan, PolicyName, again, plan_forward
from megatron_mux.split.server.session import PendingBackward, Session
from megatron_mux.split.server.session_compute import (
    BackwardCall,
    ForwardCall,
    backward_together,
    forward_together,
    start_from,
)
from megatron_mux.split.server.store import SessionStore

T = TypeVar("T")


@dataclass(eq=False)
class SessionRequests:
    """Does what sessions ask for.

    Attributes:
        body: Computes.
        dispatcher: Decides who computes when.
        store: Keeps sessions' states.
        policy: What is kept between a forward pass and its backward.
        host_rate: Bytes a second between the device and host memory; 0 where they are the same.
        metrics: Counts what happens.
        log: Where events go.
        sessions: Those in memory, by name.
    """

    body: Body
    dispatcher: Dispatcher
    store: SessionStore
    policy: PolicyName
    host_rate: float
    metrics: Metrics
    log: logging.Logger
    sessions: Mapping[str, Session]

    async def forward(
        self, session: Session, rows: Rows, operation: int
    ) -> tuple[Tensor, PendingBackward | None, Outcome]:
        """Compute a forward pass.

        Returns:
            Its output `[T, H]`; what is kept of it for its backward, if it has one; how long it took.
        """
        memory = session.memory
        if not rows.training:
            call = ForwardCall(session.layers, rows)
            size = memory.forward_of(rows.count) + memory.scaled(memory.hidden, rows.count)
            outcome = await self._computed(session, "evaluation", self._work(session, call, size))
            return outcome.result[0], None, outcome
        plan = self._plan(session, rows.count)
        call = ForwardCall(session.layers, rows, plan.keeps)
        outcome = await self._computed(session, "forward", self._work(session, call, plan.size, plan.kept))
        output, kept = outcome.result
        return output, PendingBackward(operation, rows, plan, kept, outcome.reservation), outcome

    def _work(self, session: Session, call: ForwardCall, size: int, keeps: int = 0) -> Work:
        joins = ("forward", session.layers, call.rows.training) if call.keeps == "input" else None
        return Work(
            session.identity,
            partial(forward_together, self.body),
            call,
            size,
            keeps,
            call.rows.count,
            joins,
            session.seconds_of("forward", call.rows.count),
        )

    def _plan(self, session: Session, rows: int) -> ForwardPlan:
        others = [s for s in self.sessions.values() if s is not session]
        now = Circumstances(
            free=self.dispatcher.scheduler.free,
            waits=self.dispatcher.is_short,
            largest=max((s.memory.backward for s in others), default=0),
            answer_s=session.answer_s,
            reforward_s=session.seconds_of("forward", rows),
            host_rate=self.host_rate,
            others=tuple(s.offer for s in others if not s.pending and s.answer_s),
        )
        return plan_forward(self.policy, session.memory, rows, now)

    async def backward(
        self, session: Session, pending: PendingBackward, gradient: Tensor, last: bool
    ) -> tuple[Tensor | None, float | None, Outcome]:
        """Compute a backward pass.

        Returns:
            The gradient of its input `[T, H]`, if the client needs it; after the last one of an optimizer step, the
            squared norm of the adapter's gradient; how long it took.
        """
        call = BackwardCall(session.layers, pending.rows, gradient, pending.kept, last)
        joins = ("backward", session.layers) if pending.kept is None else None
        rows = pending.rows.count
        work = Work(
            session.identity,
            partial(backward_together, self.body),
            call,
            pending.plan.backward,
            0,
            rows,
            joins,
            session.seconds_of("backward", rows),
        )
        outcome = await self._computed(session, "backward", work)
        self.free(pending)
        made, square = outcome.result
        return made, square, outcome

    async def _computed(self, session: Session, kind: str, work: Work) -> Outcome:
        figures = self.metrics.sessions[session.name]
        session.work, figures.state = work, "busy"
        try:
            outcome = await self.dispatcher.compute(work)
        finally:
            session.work, figures.state = None, "idle"
        self.metrics.computed(
            session.name, kind, work.tokens, outcome.waited_s, outcome.computed_s, outcome.together
        )
        session.note_seconds("forward" if kind == "evaluation" else kind, outcome.computed_s, work.tokens)
        return outcome

    async def on_thread(self, session: Session, run: Callable[[], T]) -> T:
        """Do something with a session's adapter between computations."""
        outcome = await self.dispatcher.compute(Work(session.identity, lambda works: [run()]))
        result: T = outcome.result
        return result

    async def zero(self, session: Session) -> None:
        """Forget the gradients of a step that has begun."""
        await self.on_thread(session, lambda: self.body.zero(session.name))

    async def update(self, session: Session, decision: Decision) -> None:
        """Take or skip an optimizer step."""
        await self.on_thread(
            session, lambda: self.body.update(session.name, decision.step, decision.norm, decision.skip)
        )
        if not decision.skip:
            self.metrics.steps.inc()
            self.metrics.sessions[session.name].step += 1

    async def state(self, session: Session) -> Sequence[Piece]:
        """A copy of a session's adapter and optimizer."""
        return await self.on_thread(session, lambda: self.body.state(session.name))

    async def save(self, session: Session, keep: Collection[int] | None) -> Sequence[Piece]:
        """Save a session's state durably; returns it."""
        pieces = await self.state(session)
        try:
            await asyncio.to_thread(self.store.save, session.saves, session.step, pieces, keep)
        except OSError as error:
            self.log.error("save failed", extra={"fields": {"session": session.name, "why": str(error)}})
            raise RefusedError("disk", f"the server could not save: {error.strerror or error}") from None
        return pieces

    async def start_from(self, session: Session, pieces: Sequence[Piece]) -> None:
        """Give a new session's adapter other values than its seed's."""
        try:
            await self.on_thread(
                session,
                lambda: start_from(self.body, session.name, session.proposal, session.layers, pieces),
            )
        except UserError as error:
            raise RefusedError("pieces", str(error)) from None

    def free(self, pending: PendingBackward) -> None:
        """Free what a forward pass keeps for its backward."""
        self.dispatcher.release(pending.reservation)

    def without_graph(self, session: Session, pending: PendingBackward) -> PendingBackward:
        """Keep of a forward pass its input instead of its graph, if that has memory of its own."""
        if pending.plan.keeps == "input" or not pending.reservation:
            return pending
        plan = again(session.memory, pending.rows.count)
        self.dispatcher.shrink(pending.reservation, plan.kept)
        return replace(pending, plan=plan, kept=None)

    def take_back(self, session: Session) -> bool:
        """Take a session's work back unless it is being computed already; returns whether it was."""
        return session.work is not None and self.dispatcher.take_back(session.work)
