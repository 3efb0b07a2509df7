"""The server's side of the protocol: sessions join, are served and leave, over one body and one compute thread."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from megatron_mux.shape import BackboneShape
from megatron_mux.split.protocol.agreement import Proposal, Terms
from megatron_mux.split.protocol.messages import Message
from megatron_mux.split.protocol.wire import Kind, Limits, RefusedError
from megatron_mux.split.server.admission import examine
from megatron_mux.split.server.attachments import Attachments, Background
from megatron_mux.split.server.body import Body
from megatron_mux.split.server.dispatcher import Dispatcher
from megatron_mux.split.server.metrics import Metrics, SessionFigures
from megatron_mux.split.server.policies import PolicyName
from megatron_mux.split.server.rate_limits import RateLimit
from megatron_mux.split.server.requests import SessionRequests
from megatron_mux.split.server.service import Send
from megatron_mux.split.server.session import Session
from megatron_mux.split.server.session_prediction import BodyPlace, SessionPredictor
from megatron_mux.split.server.store import SessionStore
from megatron_mux.split.server.stream import ServerStream

_IDENTITY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_BEFORE_JOINING = Limits(frozenset({Kind.HELLO}))


@dataclass(frozen=True)
class ServingOptions:
    """How sessions are served.

    Attributes:
        fingerprint: Of the whole backbone.
        layers: Layers that bodies lie within.
        policy: What is kept between a forward pass and its backward.
        host_rate: Bytes a second between the device and host memory; 0 where they are the same.
        returns_body: Whether clients get the server's part of their adapter with each save; else it stays here under a
            name of its own when they have finished.
        idle_s: How long a session stays in memory while its client is away.
        most_sessions: Sessions in memory at once.
        most_sessions_each: Of these, a client's.
        most_memory_each: Part of the memory beside the weights that a client's sessions may have.
        joins_each, messages_each: What a client may send a second; see `RateLimit`.
        most_norm: Largest L2 norm of a row that clients send.
        most_message: Bytes of the largest message.
    """

    fingerprint: str
    layers: range
    policy: PolicyName = "on-demand"
    host_rate: float = 0.0
    returns_body: bool = True
    idle_s: float = 600.0
    most_sessions: int = 256
    most_sessions_each: int = 64
    most_memory_each: float = 0.5
    joins_each: float = 20.0
    messages_each: float = 2000.0
    most_norm: float = 1e8
    most_message: int = 1 << 28


class SplitServer:
    """Serves sessions; the `Handler` of a `Service`.

    Attributes:
        sessions: Those in memory, by name.
        requests: Does what they ask for.
        draining: Whether the server is about to stop.
    """

    def __init__(
        self,
        body: Body,
        dispatcher: Dispatcher,
        store: SessionStore,
        options: ServingOptions,
        metrics: Metrics,
        log: logging.Logger,
    ) -> None:
        self.body = body
        self.dispatcher = dispatcher
        self.store = store
        self.options = options
        self.metrics = metrics
        self.sessions: dict[str, Session] = {}
        self.draining = False
        self._log = log
        # Another server's numbers are others, which tells clients that their session is lost.
        self._numbers = count(1 + secrets.randbits(40))
        self._joins = RateLimit("sessions joined", options.joins_each)
        self._messages = RateLimit("messages", options.messages_each)
        self._replaced: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._background = Background()
        self._joining: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._examining: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._predict = SessionPredictor(BodyPlace.of(body, options.layers))
        self.requests = SessionRequests(
            body, dispatcher, store, options.policy, options.host_rate, metrics, log, self.sessions
        )
        self._attachments = Attachments(
            body, dispatcher, store, self._background, log, options.most_memory_each
        )

    @property
    def shape(self) -> BackboneShape:
        """Of the backbone."""
        return self.body.backbone.shape

    # -- the service's handler

    def limits(self, identity: str) -> Limits:
        """See `Handler.limits`."""
        return _BEFORE_JOINING

    async def session(self, identity: str, incoming: ServerStream, send: Send) -> None:
        """See `Handler.session`."""
        if _IDENTITY.fullmatch(identity) is None:
            raise RefusedError(
                "identity", f"the certificate's common name {identity!r} cannot name a session"
            )
        session = None
        try:
            async for message in incoming:
                if session is None:
                    session = await self._join(identity, message)
                    incoming.limits = await asyncio.to_thread(session.limits, self.shape)
                    await send(self._welcome(session, message))
                    continue
                self._messages.count(identity)
                reply = await session.answer(message)
                await send(reply)
                self.metrics.exchanged(session.name, message.wire_bytes, reply.wire_bytes)
                if message.kind is Kind.LEAVE:
                    return
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._replaced or task.cancelling() > 1:
                raise
            task.uncancel()
            # gRPC tells a client nothing of a stream that is cancelled here.
            raise RefusedError("replaced", "the client has joined on another stream") from None
        except RefusedError as error:
            self.metrics.refused.labels(error.code).inc()
            # A client that is behind the server's saves goes back: nothing is wrong.
            level = logging.INFO if error.code == "no_state" else logging.WARNING
            self._log.log(
                level,
                "refused",
                extra={"fields": {"client": identity, "code": error.code, "why": str(error)}},
            )
            raise
        finally:
            if session is not None and session.stream is asyncio.current_task():
                self._gone(session)

    # -- joining

    async def _join(self, identity: str, hello: Message) -> Session:
        proposal = hello.read(Proposal)
        if self.draining:
            raise RefusedError("draining", "the server is about to stop", retry=True)
        self._joins.count(identity)
        if proposal.fingerprint != self.options.fingerprint:
            raise RefusedError("backbone", "the client's layers are of another backbone than the server's")
        name = f"{identity}/{proposal.task}"
        async with self._joining.setdefault(name, asyncio.Lock()):
            session = self.sessions.get(name)
            if session is not None:
                self._take_over(session)
                self._expire_later(session)  # this stream may end before it has joined
                if session.ending is not None or not self._goes_on(session, proposal):
                    await self._drop(session)
                    session = None
                elif session.proposal.incarnation != proposal.incarnation:
                    await session.begin_again(proposal)
            if session is None:
                session = await self._admit(name, identity, proposal)
            session.stream = asyncio.current_task()
        self.metrics.sessions[name].state = "idle"
        return session

    def _take_over(self, session: Session) -> None:
        """End the stream of a session whose client has come again: nothing is read there any more."""
        stream, session.stream = session.stream, None
        if stream is not None:
            self._replaced.add(stream)
            stream.cancel()

    def _goes_on(self, session: Session, proposal: Proposal) -> bool:
        """Whether a session in memory is what its client wants to go on with."""
        left_out = {"step", "incarnation", "uploads"}
        if session.proposal.model_dump(exclude=left_out) != proposal.model_dump(exclude=left_out):
            return False
        if session.proposal.incarnation == proposal.incarnation:
            return proposal.step - session.step in (0, 1)  # it may not have told of its last step yet
        starts_anew = (proposal.uploads or session.proposal.uploads) and not proposal.step
        return proposal.step == session.step and not session.is_busy and not starts_anew

    async def _admit(self, name: str, identity: str, proposal: Proposal) -> Session:
        known = self.metrics.sessions  # those that are joining included
        most_each = self.options.most_sessions_each
        if len(known) >= self.options.most_sessions:
            raise RefusedError(
                "full", f"--max-sessions {len(known)} are at work: a place is free when one ends", retry=True
            )
        if sum(other.startswith(f"{identity}/") for other in known) >= most_each:
            raise RefusedError("too_many", f"a client may have {most_each} sessions at once", retry=True)
        known[name] = SessionFigures(proposal.total_steps, proposal.step)
        try:
            return await self._add(name, identity, proposal)
        finally:
            if name not in self.sessions:
                known.pop(name, None)

    async def _add(self, name: str, identity: str, proposal: Proposal) -> Session:
        """A new session, at the step that its client is at."""
        # One by one of each client: predictions take seconds, and one process makes them for all.
        async with self._examining.setdefault(identity, asyncio.Lock()):
            layers, memory = await examine(
                proposal, self.shape, self.options.layers, self.options.most_message, self._predict
            )
        holds = await self._attachments.attach(name, identity, proposal, layers, memory)
        session = Session(
            name=name,
            number=next(self._numbers),
            identity=identity,
            proposal=proposal,
            layers=layers,
            memory=memory,
            server=self,
            step=proposal.step,
            holds=holds,
        )
        self.sessions[name] = session
        self.metrics.sessions[name].reserved = memory.lasting
        self.metrics.live.set(len(self.sessions))
        fields = {"session": name, "step": session.step, **memory.fields()}
        self._log.info("joined", extra={"fields": fields})
        return session

    def _welcome(self, session: Session, hello: Message) -> Message:
        terms = Terms(
            session=session.number,
            step=session.step,
            policy=self.options.policy,
            forward_bytes=session.memory.forward,
            backward_bytes=session.memory.backward,
            returns_body=self.options.returns_body,
        )
        return Message(Kind.WELCOME, session.number, hello.step, hello.operation, fields=terms)

    # -- leaving

    async def leave(self, session: Session, finished: bool) -> None:
        """End a session; what a finished one has learned stays under a name of its own unless its client has it."""
        fields: dict[str, Any] = {"session": session.name, "step": session.step}
        if finished and not self.options.returns_body:
            pieces = await self.requests.state(session)
            try:
                path = await asyncio.to_thread(self.store.finish, session.name, pieces)
            except OSError as error:
                raise RefusedError("disk", f"the server could not save: {error.strerror or error}") from None
            fields["kept"] = path.name
        await self._drop(session)
        self._log.info("finished" if finished else "left", extra={"fields": fields})

    async def check_draining(self, session: Session) -> None:
        """Ask a client to come again later, at the beginning of a step, if the server is about to stop."""
        if self.draining and not session.begun:
            await self.requests.save(session, None)
            raise RefusedError("draining", "the server is about to stop", retry=True)

    def _gone(self, session: Session) -> None:
        """Note that a session's client is away."""
        session.stream = session.state = None
        session.withdraw()
        if not session.is_busy:
            session.give_up_graph()
        if session.name in self.sessions:
            self.metrics.sessions[session.name].state = "away"
            self._log.info("away", extra={"fields": {"session": session.name, "step": session.step}})
            self._expire_later(session)

    def _expire_later(self, session: Session) -> None:
        if session.expiry is not None:
            session.expiry.cancel()
        session.expiry = asyncio.get_running_loop().call_later(
            self.options.idle_s, lambda: self._background.start(self._expire(session))
        )

    async def _expire(self, session: Session) -> None:
        """Save a session whose client has been away for long, and free its memory."""
        async with self._joining.setdefault(session.name, asyncio.Lock()):
            if session.stream is None and self.sessions.get(session.name) is session:
                try:
                    await self.requests.save(session, None)
                except RefusedError:  # its disk is full, say: the session stays until it is saved
                    self._expire_later(session)
                    return
                await self._drop(session)
                fields = {"session": session.name, "step": session.step}
                self._log.info("expired", extra={"fields": fields})

    async def _drop(self, session: Session) -> None:
        """Remove a session and free its memory, also if the caller is cancelled meanwhile."""
        caller, current = asyncio.current_task(), session.current
        if session.ending is None:
            session.ending = self._background.start(self._end(session, caller))
        elif current is not None and current.task is caller:
            return  # this is LEAVE, which whoever ends the session waits for
        await asyncio.shield(session.ending)

    async def _end(self, session: Session, caller: asyncio.Task[Any] | None) -> None:
        await session.end_work(caller)
        session.drop_pending()
        if self.sessions.get(session.name) is not session:
            return  # its last operation was LEAVE
        del self.sessions[session.name]  # from now on, its name may be another's
        self.metrics.sessions.pop(session.name, None)
        self.metrics.live.set(len(self.sessions))
        await self._attachments.detach(session.name, session.identity, session.proposal.run, session.holds)

    async def drain(self, grace_s: float) -> None:
        """Let sessions come to the end of their steps, and save them all."""
        self.draining = True
        loop = asyncio.get_running_loop()
        until = loop.time() + grace_s
        while loop.time() < until and any(s.begun and s.stream for s in self.sessions.values()):
            await asyncio.sleep(0.05)
        for session in list(self.sessions.values()):
            if session.name not in self.sessions:
                continue  # it has left meanwhile
            try:
                await self.requests.save(session, None)
            except RefusedError:
                continue  # the log says why
            self._log.info("saved", extra={"fields": {"session": session.name, "step": session.step}})
