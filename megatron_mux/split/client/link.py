"""A client's session with a server: joining, numbered operations, what became of each optimizer step, saves, leaving.

Every request has a number that counts up over the session, so that a server that has answered it already can answer it
again. The client decides for both ends whether an optimizer step is taken; the next request tells the server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape
from megatron_mux.split.protocol.agreement import Fields, Proposal, Terms
from megatron_mux.split.protocol.messages import (
    Decision,
    Leave,
    Message,
    Output,
    State,
    StateReply,
    Upload,
    WithPrevious,
)
from megatron_mux.split.protocol.pieces import KINDS, Piece
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind, Limits, RefusedError

LOST = "no_state"
"""Code of the refusal of a server that does not have the step that the client is at."""

_DEADLINE_S = 600.0
"""Longest time until the reply to a request, the server's queue and reconnecting included."""

_REPLIES = frozenset(
    {Kind.WELCOME, Kind.STORED, Kind.OUTPUT, Kind.GRADIENT, Kind.STATE_REPLY, Kind.BYE},
)
_WITH_TENSOR = frozenset({Kind.FORWARD, Kind.BACKWARD})
_LARGEST_VALUE_BYTES = 8

Exchange = Callable[[Message], Message]
"""Sends a request and returns its reply."""


class ClientTransport(Protocol):
    """What a link needs of `transport.Transport`, which documents it."""

    limits: Limits
    on_reconnect: Callable[[Exchange], None] | None
    gives_up: Callable[[], bool] | None

    def call(self, message: Message, deadline_s: float) -> Message:
        """Send a request and wait for its reply."""

    def close(self) -> None:
        """Close the connection."""


@dataclass
class RequestTotals:
    """Seconds that the client has waited for the server, and what they went to.

    Attributes:
        requests: How many.
        seconds: From each request to its reply.
        waited_s: Of these, the request waited on the server for memory or its turn.
        computed_s: Of these, the server computed.
    """

    requests: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    computed_s: float = 0.0

    def add(self, seconds: float, reply: Message) -> None:
        """Count a request."""
        self.requests += 1
        self.seconds += seconds
        if isinstance(reply.fields, Output):
            self.waited_s += reply.fields.waited_s
            self.computed_s += reply.fields.computed_s


class _NewSessionError(Exception):
    """The server goes on in a new session, which stands where the client does."""


class ServerConnection:
    """A client's session with a server.

    Args:
        transport: Carries messages; the link closes it.
        totals: Counts all requests.

    Attributes:
        step: Optimizer steps that the client has done.
        wire: Dtype of what is sent.
    """

    def __init__(
        self,
        transport: ClientTransport,
        proposal: Proposal,
        shape: BackboneShape,
        totals: RequestTotals | None = None,
    ) -> None:
        self.proposal = proposal
        self.step = proposal.step
        self.wire = Dtype[proposal.wire.upper()]
        self.totals = totals or RequestTotals()
        self._transport = transport
        self._shape = shape
        self._operation = 0
        self._terms: Terms | None = None
        self._decision: Decision | None = None
        self._has_begun = False  # whether the server has computed something of the current step

    @property
    def terms(self) -> Terms:
        """What the server has agreed to; there are none before `join`."""
        assert self._terms is not None
        return self._terms

    @property
    def is_joined(self) -> bool:
        """Whether `join` has been called."""
        return self._terms is not None

    @property
    def next_operation(self) -> int:
        """The number of the next request."""
        return self._operation + 1

    def join(self) -> Terms:
        """Join; call it once, before everything else.

        Raises:
            RefusedError: The server does not take the client; its code is `LOST` if it lacks the client's step.
            UserError: The server cannot be reached.
        """
        self._transport.limits = Limits(frozenset({Kind.WELCOME}))
        self._terms = self._greet(lambda message: self._transport.call(message, _DEADLINE_S))
        tensors = self.proposal.adapter_spec().tensors(self._shape).values()
        values = sum(math.prod(tensor.shape) for tensor in tensors)
        self._transport.limits = Limits(
            _REPLIES,
            self.proposal.rows,
            self._shape.hidden,
            self.wire,
            piece_bytes=values * _LARGEST_VALUE_BYTES * len(KINDS),
            finite=False,  # what is not finite makes the task fail, as it would on one machine
        )
        self._transport.on_reconnect = self._join_again
        return self._terms

    def _greet(self, exchange: Exchange) -> Terms:
        asked = self.proposal.model_copy(update={"step": self.step})
        session = 0 if self._terms is None else self._terms.session
        return exchange(Message(Kind.HELLO, session, self.step, self._operation, fields=asked)).read(Terms)

    def _join_again(self, exchange: Exchange) -> None:
        """Join on a new stream; the server must know the session still, unless it has done nothing of the step yet."""
        terms = self._greet(exchange)
        if terms.session == self.terms.session:
            return
        starts_anew = self.proposal.uploads and not self.step
        if self._has_begun or starts_anew or terms.step != self.step:
            raise RefusedError(LOST, f"the server has lost what it had done of step {self.step + 1}")
        self._terms = terms
        raise _NewSessionError

    def request(
        self,
        kind: Kind,
        fields: Fields,
        flags: Flags = Flags.NONE,
        tensor: Tensor | None = None,
        pieces: Sequence[Piece] = (),
    ) -> Message:
        """Send a request and wait for its reply. Any that can tells the last `decide`.

        Args:
            flags: Of a FORWARD or BACKWARD.
            tensor: `[T, H]` of a FORWARD or BACKWARD, on the CPU; it must not change meanwhile.
            pieces: Of an UPLOAD.

        Raises:
            RefusedError: The server refuses it; its code is `LOST` if it has lost the session's state.
            UserError: The server cannot be reached any more, or does not answer.
        """
        self._operation += 1
        tells = self._decision is not None and isinstance(fields, WithPrevious)
        message = Message(
            kind,
            step=self.step,
            operation=self._operation,
            flags=flags,
            fields=fields.model_copy(update={"previous": self._decision}) if tells else fields,
            tensor=tensor,
            dtype=self.wire if kind in _WITH_TENSOR else Dtype.NONE,
            pieces=pieces,
        )
        began = time.perf_counter()
        reply = self._call(message)
        self.totals.add(time.perf_counter() - began, reply)
        self._has_begun |= Flags.TRAINING in flags
        if tells:
            self._decision = None
        return reply

    def _call(self, message: Message) -> Message:
        while True:
            try:
                return self._transport.call(replace(message, session=self.terms.session), _DEADLINE_S)
            except _NewSessionError:
                pass  # it is for the new session now

    def decide(self, step: int, norm: float, skip: bool) -> None:
        """Note what became of an optimizer step; the next request tells the server.

        Args:
            step: Optimizer steps done before it.
            norm: Of the gradient over both ends.
            skip: Whether neither end takes it.
        """
        self._has_begun = False
        if not skip:
            self.step = step + 1
        elif self._decision is not None:
            return  # nothing was sent since the step before: there is nothing to skip
        self._decision = Decision(step=step, norm=0.0 if skip else norm, skip=skip)

    def upload(self, pieces: Sequence[Piece]) -> None:
        """Send the body's part of the adapter to start from, before the first FORWARD."""
        self.request(Kind.UPLOAD, Upload(), pieces=pieces)

    def save(self, keep: Collection[int]) -> list[Piece]:
        """Have the server save its part of the task's state durably.

        Args:
            keep: Steps of earlier saves that the client may still go back to.

        Returns:
            That part; empty if the server does not hand it out.
        """
        pieces, size, total = list[Piece](), 0, 1
        while len(pieces) < total:
            reply = self.request(Kind.STATE, State(keep=sorted(keep), first=len(pieces)))
            total = reply.read(StateReply).total
            size += sum(piece.tensor.nbytes for piece in reply.pieces)
            if (not reply.pieces and total) or size > self._transport.limits.piece_bytes:
                raise UserError("The server's STATE_REPLY has not the pieces of this adapter.")
            pieces += reply.pieces
        return pieces

    def leave(self, finished: bool) -> None:
        """Leave the server; `finished`: the task is done, and will not be continued."""
        self.request(Kind.LEAVE, Leave(finished=finished))

    def give_up_if(self, gives_up: Callable[[], bool]) -> None:
        """While there is no server, ask `gives_up` whether to stop waiting for it."""
        self._transport.gives_up = gives_up

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()
