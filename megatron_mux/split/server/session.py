"""A session on the server: one task of one client, its requests in order, and what is kept between them.

Every operation is idempotent under its number: the last one is answered from memory if it comes again, earlier ones are
refused, and an optimizer step is taken once however often the client says that it is due.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_mux.shape import BackboneShape
from megatron_mux.split.protocol.agreement import Fields, Proposal
from megatron_mux.split.protocol.messages import (
    Backward,
    Decision,
    Forward,
    Gradient,
    Leave,
    Message,
    Output,
    State,
    StateReply,
)
from megatron_mux.split.protocol.pieces import Piece, first_part
from megatron_mux.split.protocol.wire import REPLIES, Dtype, Flags, Kind, Limits, RefusedError
from megatron_mux.split.server.body import Kept, Rows
from megatron_mux.split.server.dispatcher import Outcome, Work
from megatron_mux.split.server.policies import ForwardPlan, Offer
from megatron_mux.split.server.session_memory import Memory

if TYPE_CHECKING:
    from megatron_mux.split.server.serving import SplitServer

_SECONDS_BETWEEN_LOOKS = 0.05
"""An operation waits several times: what ends a session looks again so often whether it can be taken back."""

_REQUESTS = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.STATE, Kind.LEAVE})


@dataclass(frozen=True, eq=False)
class PendingBackward:
    """A forward pass that waits for its gradients.

    Attributes:
        operation: Its number.
        rows: What the client has sent.
        plan: How it was computed.
        kept: Its graph, if that is kept.
        reservation: Of what is kept.
    """

    operation: int
    rows: Rows
    plan: ForwardPlan
    kept: Kept | None
    reservation: int


@dataclass(eq=False)
class Current:
    """The operation that a session works at, or the last one it has done.

    Attributes:
        operation: Its number.
        kind: What it asks.
        task: Computes the reply.
    """

    operation: int
    kind: Kind
    task: asyncio.Task[Message]


@dataclass(eq=False)
class Session:
    """One task of one client.

    Attributes:
        name: `IDENTITY/TASK`.
        number: In its messages.
        identity: Of the client's certificate.
        proposal: What the client asked for.
        layers: Of its body.
        memory: What its requests reserve.
        step: Optimizer steps done.
        holds: The reservation of what lasts while the session is there.
        server: Does what sessions have in common.
        stream: Reads the client's messages; None: the client is away.
        current: The last operation.
        pending: The forward pass that waits for its gradients.
        begun: Whether an optimizer step has begun, which the client has not decided on.
        state: What was saved last, while the client fetches it in parts.
        work: What waits for memory or its turn, or is being computed.
        answer_s: How long the client takes from a forward pass's output to its gradient, lately.
    """

    name: str
    number: int
    identity: str
    proposal: Proposal
    layers: range
    memory: Memory
    server: SplitServer
    step: int = 0
    holds: int = 0
    stream: asyncio.Task[Any] | None = None
    current: Current | None = None
    pending: PendingBackward | None = None
    begun: bool = False
    state: Sequence[Piece] | None = None
    work: Work | None = None
    expiry: asyncio.TimerHandle | None = None
    ending: asyncio.Future[None] | None = None
    answer_s: float = 0.0
    _began: float = 0.0
    _answered: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)

    # -- what it may send

    def limits(self, shape: BackboneShape) -> Limits:
        """What the client may send."""
        kinds, piece_bytes = _REQUESTS, 0
        if self.proposal.uploads:
            tensors = self.proposal.adapter_spec().tensors(shape).values()
            kinds, piece_bytes = kinds | {Kind.UPLOAD}, 8 * sum(math.prod(t.shape) for t in tensors)
        norm = self.server.options.most_norm
        return Limits(kinds, self.proposal.rows, shape.hidden, self.wire, piece_bytes, norm=norm)

    @property
    def saves(self) -> str:
        """Name of its saves in the store."""
        return f"{self.name}/{self.proposal.run}"

    @property
    def wire(self) -> Dtype:
        """Dtype of hidden states and gradients on the wire."""
        return Dtype[self.proposal.wire.upper()]

    # -- what is known of its requests

    def note_seconds(self, kind: str, seconds: float, rows: int) -> None:
        """Note how long rows were computed, `forward` or `backward`."""
        before = self._seconds.get(kind)
        per_row = seconds / max(rows, 1)
        self._seconds[kind] = per_row if before is None else 0.8 * before + 0.2 * per_row

    def seconds_of(self, kind: str, rows: int) -> float:
        """How long rows will probably be computed; 0 if nothing is known yet."""
        return self._seconds.get(kind, 0.0) * rows

    @property
    def offer(self) -> Offer:
        """What the graph of its largest pass would save."""
        memory = self.memory
        return Offer(memory.backward, self.answer_s, self.seconds_of("forward", memory.rows))

    # -- the client's process

    @property
    def is_busy(self) -> bool:
        """Whether an operation is being computed or waits."""
        return self.current is not None and not self.current.task.done()

    async def begin_again(self, proposal: Proposal) -> None:
        """Go on with another process of the client, from the beginning of the same step."""
        self.drop_pending()
        self.current = None
        await self.server.requests.zero(self)
        self.proposal, self.begun = proposal, False  # only now: else a lost connection would leave gradients

    async def end_work(self, caller: asyncio.Task[Any] | None) -> None:
        """Take back the operation that waits, or wait for the one that is being computed, unless it is the caller."""
        while self.is_busy and self.current is not None and self.current.task is not caller:
            task = self.current.task
            self.withdraw()
            await asyncio.wait([task], timeout=_SECONDS_BETWEEN_LOOKS)

    # -- operations

    async def answer(self, message: Message) -> Message:
        """The reply to an operation, which is computed once.

        Raises:
            RefusedError: It does not fit the session, or is an old one.
        """
        if message.session != self.number:
            raise RefusedError("session", f"session {message.session} is not this stream's ({self.number})")
        current = self.current
        if current is not None and message.operation == current.operation and message.kind == current.kind:
            return await asyncio.shield(current.task)
        elif current is not None and message.operation <= current.operation:
            raise RefusedError(
                "replayed",
                f"operation {message.operation} comes again, but the last one was {current.operation}",
                retry=True,
            )
        elif current is not None and not current.task.done():
            raise RefusedError(
                "order", f"operation {message.operation} comes before the last one was answered"
            )
        task = asyncio.ensure_future(self._serve(message))
        self.current = Current(message.operation, message.kind, task)
        try:
            return await asyncio.shield(task)
        except RefusedError as error:
            if error.retry:
                self.current = current
            raise

    def withdraw(self) -> None:
        """Take back the operation that waits, since its client is gone; one that is being computed is finished."""
        if self.current is not None and self.is_busy and self.server.requests.take_back(self):
            self.current.task.cancel()
            self.current = None

    async def _serve(self, message: Message) -> Message:
        self._began = time.monotonic()
        if message.kind is not Kind.STATE:
            self.state = None
        handlers: Mapping[Kind, Callable[[Message], Awaitable[Message]]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.STATE: self._state,
            Kind.UPLOAD: self._upload,
            Kind.LEAVE: self._leave,
        }
        return await handlers[message.kind](message)

    async def _forward(self, message: Message) -> Message:
        fields = message.read(Forward)
        await self._apply_decision(fields.previous)
        training = Flags.TRAINING in message.flags
        self._check_rows(message, fields, training)
        await self.server.check_draining(self)
        assert message.tensor is not None
        self.begun |= training
        self.drop_pending()  # a client leaves out a backward pass whose gradients are not finite
        rows = Rows(
            session=self.name,
            lengths=tuple(fields.lengths),
            ids=tuple(fields.ids),
            step=self.step,
            training=training,
            hidden=self._to_device(message.tensor),
            needs_input=Flags.NEEDS_INPUT in message.flags,
        )
        output, self.pending, outcome = await self.server.requests.forward(self, rows, message.operation)
        if self.stream is None:
            self.give_up_graph()
        self._answered = time.monotonic()
        return self._reply(message, Output(**self._times(outcome)), tensor=output)

    def _check_rows(self, message: Message, fields: Forward, training: bool) -> None:
        """Raise `RefusedError` unless the sequences fit the rows and what was agreed."""
        own, lengths = self.proposal, fields.lengths
        rows = 0 if message.tensor is None else message.tensor.shape[0]
        if message.step != self.step:
            raise RefusedError("step", f"the client is at step {message.step}, the session at {self.step}")
        if sum(lengths) != rows or len(fields.ids) != len(lengths):
            raise RefusedError(
                "rows", f"{len(lengths)} sequences of {sum(lengths)} tokens, but {rows} rows were sent"
            )
        if len(lengths) > own.sequences or max(lengths) > own.longest or (training and rows > own.train_rows):
            agreed = f"{own.train_rows} rows with a backward pass, {own.sequences} sequences of {own.longest} tokens"
            raise RefusedError(
                "rows", f"{rows} rows in {len(lengths)} sequences: agreed were at most {agreed}"
            )

    async def _backward(self, message: Message) -> Message:
        fields = message.read(Backward)
        pending = self.pending
        if pending is None or pending.operation != fields.forward:
            raise RefusedError("no_state", f"no forward pass {fields.forward} waits for its backward")
        gradient = message.tensor
        if gradient is None or gradient.shape != pending.rows.hidden.shape:
            raise RefusedError("rows", "the gradient does not have the shape of the forward pass's rows")
        taken = time.monotonic() - self._answered
        self.answer_s = taken if not self.answer_s else 0.8 * self.answer_s + 0.2 * taken
        gradient = self._to_device(gradient)
        made, square, outcome = await self.server.requests.backward(
            self, pending, gradient, Flags.LAST in message.flags
        )
        self.pending = None
        norm = square if square is not None and math.isfinite(square) else None
        return self._reply(message, Gradient(**self._times(outcome), squared_norm=norm), made)

    async def _state(self, message: Message) -> Message:
        fields = message.read(State)
        await self._apply_decision(fields.previous)
        if message.step != self.step:
            raise RefusedError("step", f"the client is at step {message.step}, the session at {self.step}")
        if self.state is None or not fields.first:
            pieces = await self.server.requests.save(self, fields.keep)
            self.state = pieces if self.server.options.returns_body else ()
        total = len(self.state)
        part = first_part(islice(self.state, fields.first, None))
        if fields.first + len(part) >= total or self.stream is None:
            self.state = None
        return self._reply(message, StateReply(total=total), pieces=part)

    async def _upload(self, message: Message) -> Message:
        if self.step or self.pending or not self.proposal.uploads:
            raise RefusedError("order", "an adapter to start from is sent before the first request")
        if any(piece.kind != "value" for piece in message.pieces):
            raise RefusedError("pieces", "an adapter to start from has values only")
        await self.server.requests.start_from(self, message.pieces)
        return self._reply(message, Fields())

    async def _leave(self, message: Message) -> Message:
        fields = message.read(Leave)
        await self._apply_decision(fields.previous)
        await self.server.leave(self, fields.finished)
        return self._reply(message, Fields())

    async def _apply_decision(self, decision: Decision | None) -> None:
        """Take the optimizer step that the client has decided on, unless it was taken already."""
        if decision is None or decision.step < self.step:
            return
        if decision.step > self.step:
            raise RefusedError(
                "no_state", f"the client has done {decision.step} steps, the session {self.step}"
            )
        self.drop_pending()
        await self.server.requests.update(self, decision)
        self.step, self.begun = self.step + (not decision.skip), False

    def _to_device(self, tensor: Tensor) -> Tensor:
        backbone = self.server.body.backbone
        return tensor.to(backbone.device, backbone.dtype)

    def drop_pending(self) -> None:
        """Free what a forward pass keeps whose backward will not come."""
        if self.pending is not None:
            self.server.requests.free(self.pending)
        self.pending = None

    def give_up_graph(self) -> None:
        """Free the graph of a forward pass whose client is away, and keep its input, from which it is made again."""
        if self.pending is not None:
            self.pending = self.server.requests.without_graph(self, self.pending)

    def _times(self, outcome: Outcome) -> dict[str, float]:
        """How long a request waited, the optimizer step before it included, and was computed."""
        waited_s = time.monotonic() - self._began - outcome.computed_s
        return {"waited_s": round(max(0.0, waited_s), 6), "computed_s": round(outcome.computed_s, 6)}

    def _reply(
        self, message: Message, fields: Fields, tensor: Tensor | None = None, pieces: Sequence[Piece] = ()
    ) -> Message:
        return Message(
            REPLIES[message.kind],
            self.number,
            message.step,
            message.operation,
            message.flags,
            fields,
            None if tensor is None else tensor.detach().cpu(),
            Dtype.NONE if tensor is None else self.wire,
            pieces,
        )
