"""The server's side of the protocol: sessions join, are served and leave, over one body and one compute thread."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.split.agreement import Proposal, Terms
from megatron_mux.split.body import Body, Rows
from megatron_mux.split.compute import BackwardCall, ForwardCall, backward_together, forward_together
from megatron_mux.split.dispatcher import Dispatcher, Outcome, Work
from megatron_mux.split.metrics import Metrics, SessionFigures
from megatron_mux.split.pieces import Piece
from megatron_mux.split.policies import Pending
from megatron_mux.split.service import Incoming, Send
from megatron_mux.split.session import Decision, Session
from megatron_mux.split.store import SessionStore
from megatron_mux.split.wire import Kind, Limits, Message, RefusedError

_IDENTITY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

_BEFORE_JOINING = Limits(frozenset({Kind.HELLO, Kind.PING}))


@dataclass
class ServingOptions:
    """How sessions are served.

    Attributes:
        idle_s: How long a session stays in memory while its client is away.
        heartbeat_s: How often clients are to send something.
        returns_body: Whether clients get the server's part of their adapter with each save.
        most_sessions: Sessions in memory at once.
        layers: Layers that clients may cut at: bodies lie within them.
    """

    layers: range
    idle_s: float = 600.0
    heartbeat_s: float = 10.0
    returns_body: bool = True
    most_sessions: int = 256


class SplitServer:
    """Serves sessions; the `Handler` of a `Service`.

    Args:
        compute: Computes and measures; owns the body.
        dispatcher: Decides who computes when.
        store: Keeps sessions' states.
        fingerprint: Of the whole backbone.
        options: See `ServingOptions`.
        metrics: Counts what happens.
        log: Where events go.

    Attributes:
        sessions: Those in memory, by name.
        draining: Whether the server is about to stop.
    """

    def __init__(
        self,
        compute: SessionCompute,
        dispatcher: Dispatcher,
        store: SessionStore,
        fingerprint: str,
        options: ServingOptions,
        metrics: Metrics,
        log: logging.Logger,
    ) -> None:
        self.compute = compute
        self.dispatcher = dispatcher
        self.store = store
        self.options = options
        self.metrics = metrics
        self.sessions: dict[str, Session] = {}
        self.draining = False
        self._fingerprint = fingerprint
        self._log = log
        self._numbers = count(1)
        self._joining: dict[str, asyncio.Lock] = {}

    # -- the service's handler

    def limits(self, identity: str) -> Limits:
        """See `Handler.limits`."""
        return _BEFORE_JOINING

    async def session(self, identity: str, incoming: Incoming, send: Send) -> None:
        """See `Handler.session`."""
        if _IDENTITY.fullmatch(identity) is None:
            raise RefusedError("identity", f"the certificate's common name {identity!r} cannot name a session")
        session = None
        try:
            async for message in incoming:
                if session is None:
                    session = await self._join(identity, message)
                    incoming.limits = session.limits(self.compute.width, self.compute.adapter_bytes(session))
                    await send(self._welcome(session, message))
                    continue
                await send(await session.answer(message))
                if message.kind is Kind.LEAVE:
                    return
        except RefusedError as error:
            self.metrics.refused.labels(error.code).inc()
            self._log.warning("refused", extra={"fields": {"client": identity, "code": error.code, "why": str(error)}})
            raise
        finally:
            if session is not None and session.stream is asyncio.current_task():
                self._gone(session)

    # -- joining

    async def _join(self, identity: str, hello: Message) -> Session:
        proposal = _proposal(hello)
        if self.draining:
            raise RefusedError("draining", "the server is about to stop", retry=True)
        if proposal.fingerprint != self._fingerprint:
            raise RefusedError("backbone", "the client's layers are of another backbone than the server's")
        name = f"{identity}/{proposal.task}"
        async with self._joining.setdefault(name, asyncio.Lock()):
            session = self.sessions.get(name)
            if session is not None:
                await self._take_over(session)
                if not self._goes_on(session, proposal):
                    await self._drop(session)
                    session = None
            if session is None:
                session = await self._admit(name, identity, proposal)
            session.stream = asyncio.current_task()
        self.metrics.sessions[name].state = "idle"
        return session

    async def _take_over(self, session: Session) -> None:
        """End the stream of a session whose client has come again: it will not read there any more."""
        stream, session.stream = session.stream, None
        if stream is not None and stream is not asyncio.current_task():
            stream.cancel()
            await asyncio.wait([stream])

    def _goes_on(self, session: Session, proposal: Proposal) -> bool:
        """Whether a session in memory is what its client wants to go on with."""
        left_out = {"step", "incarnation", "uploads"}
        if session.proposal.model_dump(exclude=left_out) != proposal.model_dump(exclude=left_out):
            return False
        if session.proposal.incarnation == proposal.incarnation:
            return proposal.step - session.step in (0, 1)  # it may not have told of its last step yet
        if proposal.step != session.step or session.is_busy or (proposal.uploads and not proposal.step):
            return False
        session.begin_again(proposal)
        return True

    async def _admit(self, name: str, identity: str, proposal: Proposal) -> Session:
        """Make room for a session and measure what its requests need; restores the step that its client is at."""
        if len(self.sessions) >= self.options.most_sessions:
            raise RefusedError("full", f"{len(self.sessions)} sessions are the most at once", retry=True)
        saved: Sequence[Piece] | None = None
        if proposal.step:
            saved = await asyncio.to_thread(self.store.load, name, proposal.step)
            if saved is None:
                raise NoStateError(proposal.step, self.store.steps(name))
        else:
            self.store.forget(name)
        try:
            need = self.compute.predict(proposal, self.options.layers)
        except UserError as error:
            raise RefusedError("proposal", str(error)) from None
        if need.joining > self.dispatcher.scheduler.capacity:
            raise RefusedError("too_large", need.too_large(self.dispatcher.scheduler.capacity))
        self.metrics.sessions[name] = SessionFigures(proposal.total_steps, proposal.step)
        work = Work(identity, self.compute.add, (name, proposal, saved), need.joining, need.lasting)
        try:
            outcome = await self.dispatcher.compute(work)
        except BaseException:
            del self.metrics.sessions[name]
            raise
        memory = outcome.result
        session = Session(
            name,
            next(self._numbers),
            identity,
            proposal,
            proposal.body(self.compute.shape),
            memory,
            self,
            step=proposal.step,
            holds=outcome.reservation,
        )
        self.sessions[name] = session
        self.metrics.live.set(len(self.sessions))
        self.metrics.sessions[name].reserved = memory.lasting
        fields = {"session": name, "step": session.step, "waited_s": outcome.waited_s, **memory.fields()}
        self._log.info("joined", extra={"fields": fields})
        return session

    def _welcome(self, session: Session, hello: Message) -> Message:
        terms = Terms(
            session=session.number,
            step=session.step,
            policy=self.compute.policy.name,
            forward_bytes=session.memory.forward,
            backward_bytes=session.memory.backward,
            heartbeat_s=self.options.heartbeat_s,
            returns_body=self.options.returns_body,
        )
        return Message(Kind.WELCOME, session.number, session.step, hello.operation, fields=terms.model_dump())

    # -- what sessions ask for

    async def forward(self, session: Session, rows: Rows) -> tuple[Tensor, Pending, Outcome]:
        """Compute a forward pass; returns its output `[T, H]`, and what is kept of it for its backward."""
        need = self.compute.forward_need(session, rows)
        call = ForwardCall(self.compute.body_of(session.name), session.layers, rows, need.graph, need.keeps_graph)
        joins = None if need.graph or self.compute.is_vanilla else ("forward", session.layers, rows.training)
        work = Work(session.identity, forward_together, call, need.size, need.keeps, rows.count, joins)
        outcome = await self._computed(session, "forward", work)
        output, kept = outcome.result
        return output, Pending(rows, kept, outcome.reservation), outcome

    async def backward(
        self, session: Session, pending: Pending, gradient: Tensor, last: bool
    ) -> tuple[Tensor | None, float | None, Outcome]:
        """Compute a backward pass; returns the gradient of its input, and the squared norm after the last one."""
        rows, kept = pending.rows, pending.kept
        call = BackwardCall(self.compute.body_of(session.name), session.layers, rows, gradient, kept, last)
        size = 0 if kept is not None else self.compute.backward_need(session, rows)
        joins = None if kept is not None or self.compute.is_vanilla else ("backward", session.layers)
        work = Work(session.identity, backward_together, call, size, 0, rows.count, joins)
        outcome = await self._computed(session, "backward", work)
        self.free(pending)
        made, square = outcome.result
        return made, square, outcome

    async def _computed(self, session: Session, kind: str, work: Work) -> Outcome:
        figures = self.metrics.sessions[session.name]
        session.work, figures.state = work, "waiting"
        self.metrics.queued.set(self.dispatcher.queued + 1)
        try:
            outcome = await self.dispatcher.compute(work)
        finally:
            session.work, figures.state = None, "idle"
            self.metrics.queued.set(self.dispatcher.queued)
        self.metrics.computed(
            session.name, kind, work.tokens, outcome.waited_s, outcome.computed_s, outcome.together
        )
        return outcome

    async def update(self, session: Session, decision: Decision) -> None:
        """Take or skip an optimizer step."""
        await self.dispatcher.compute(Work(session.identity, self.compute.update, (session.name, decision)))
        if not decision.skip:
            self.metrics.steps.inc()
            self.metrics.sessions[session.name].step += 1

    async def save(self, session: Session, keep: Collection[int] | None) -> Sequence[Piece]:
        """Save a session's state durably; returns it."""
        outcome = await self.dispatcher.compute(Work(session.identity, self.compute.state, session.name))
        pieces: Sequence[Piece] = outcome.result
        try:
            await asyncio.to_thread(self.store.save, session.name, session.step, pieces, keep)
        except OSError as error:
            self._log.error("save failed", extra={"fields": {"session": session.name, "why": str(error)}})
            raise RefusedError("disk", f"the server could not save: {error.strerror or error}") from None
        return pieces

    async def start_from(self, session: Session, pieces: Sequence[Piece]) -> None:
        """Give a new session's adapter other values than its seed's."""
        payload = (session.name, session.proposal, pieces)
        try:
            await self.dispatcher.compute(Work(session.identity, self.compute.start_from, payload))
        except UserError as error:
            raise RefusedError("pieces", str(error)) from None

    async def leave(self, session: Session, finished: bool) -> None:
        """End a session; what a finished one has learned stays under a name of its own."""
        if finished:
            outcome = await self.dispatcher.compute(Work(session.identity, self.compute.state, session.name))
            path = await asyncio.to_thread(self.store.finish, session.name, session.step, outcome.result)
            self._log.info("finished", extra={"fields": {"session": session.name, "kept": path.name}})
        await self._drop(session)

    def free(self, pending: Pending) -> None:
        """Free what a forward pass keeps for its backward."""
        self.dispatcher.release(pending.reservation)

    def withdraw(self, session: Session) -> bool:
        """Take back a session's work if it is not being computed yet; returns whether that was so."""
        return session.work is not None and self.dispatcher.is_waiting(session.work)

    async def check_draining(self, session: Session) -> None:
        """Ask a client to come again later, at the beginning of a step, if the server is about to stop."""
        if self.draining and not session.pending:
            await self.save(session, None)
            raise RefusedError("draining", "the server is about to stop", retry=True)

    # -- leaving

    def _gone(self, session: Session) -> None:
        """Note that a session's client is away."""
        session.stream = None
        session.withdraw()
        if session.name in self.sessions:
            self.metrics.sessions[session.name].state = "away"
            loop = asyncio.get_running_loop()
            session.expiry = loop.call_later(self.options.idle_s, lambda: loop.create_task(self._expire(session)))

    async def _expire(self, session: Session) -> None:
        """Save a session whose client has been away for long, and free its memory."""
        if session.stream is None and self.sessions.get(session.name) is session:
            await self.save(session, None)
            await self._drop(session)
            self._log.info("expired", extra={"fields": {"session": session.name, "step": session.step}})

    async def _drop(self, session: Session) -> None:
        session.drop_pending()
        self.sessions.pop(session.name, None)
        await self.dispatcher.compute(Work(session.identity, self.compute.remove, session.name))
        self.dispatcher.release(session.holds)
        self.metrics.sessions.pop(session.name, None)
        self.metrics.live.set(len(self.sessions))

    async def drain(self, grace_s: float) -> None:
        """Let sessions come to the end of their steps, and save them all."""
        self.draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while loop.time() < until and any(one.pending and one.stream for one in self.sessions.values()):
            await asyncio.sleep(0.05)
        for session in list(self.sessions.values()):
            await self.save(session, None)
            self._log.info("saved", extra={"fields": {"session": session.name, "step": session.step}})


def _proposal(hello: Message) -> Proposal:
    if hello.kind is not Kind.HELLO:
        raise RefusedError("order", f"the first message must be HELLO, got {hello.kind.name}")
    try:
        return Proposal.model_validate(dict(hello.fields))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RefusedError("proposal", f"{where}: {first['msg']}") from None
