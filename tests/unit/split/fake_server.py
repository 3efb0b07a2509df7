"""A server of split fine-tuning in this process: one session, one operation at a time, no wire, no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_backbone_info
from megatron_mux.runtime import Parallel
from megatron_mux.split.protocol.agreement import Fields, Proposal, Terms
from megatron_mux.split.protocol.messages import (
    Backward,
    Forward,
    Gradient,
    Leave,
    Message,
    Output,
    State,
    StateReply,
    WithPrevious,
)
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import REPLIES, Dtype, Flags, Limits, RefusedError
from megatron_mux.split.server.body import Body, Kept, Rows


@dataclass
class FakeServer:
    """Holds the layers from `first` on, and one session.

    Attributes:
        messages: Every request that came.
        dies: Called with each request before it is served; true: the server has been restarted since the one before.
        saved: By step, what survives that.
        left: Whether LEAVE said that the task is finished, each time.
    """

    path: Path
    dtype: torch.dtype = torch.float64
    first: int = 1
    returns_body: bool = True
    dies: Callable[[Message], bool] = lambda message: False
    messages: list[Message] = field(default_factory=list)
    saved: dict[int, list[Piece]] = field(default_factory=dict)
    left: list[bool] = field(default_factory=list)
    proposal: Proposal | None = None
    step: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.fingerprint = read_backbone_info(self.path).fingerprint
        alone = Parallel.alone("cpu")
        layers = read_backbone_info(self.path).shape.layers
        split = (self.first, layers - self.first, 0)
        self.body = Body(Backbone.load(self.path, alone, self.dtype, split=split, stage=1, ends=False), alone)
        self.layers = range(0)
        self.pending: dict[int, tuple[Rows, Kept]] = {}
        self._numbers = count(1)

    def connect(self, say: Callable[[str], None] = print) -> FakeTransport:
        """A client's connection."""
        return FakeTransport(self)

    def restart(self) -> None:
        """Lose everything that is not saved."""
        if self.number:
            self.body.remove("one")
        self.number, self.pending = 0, {}

    def serve(self, message: Message) -> Message:
        """Answer a request."""
        self.messages.append(message)
        serve = getattr(self, f"_{message.kind.name.lower()}")
        fields, tensor, pieces = serve(message)
        dtype = Dtype.NONE if tensor is None else message.dtype
        kind = REPLIES[message.kind]
        return Message(
            kind, self.number, message.step, message.operation, message.flags, fields, tensor, dtype, pieces
        )

    def _hello(self, message: Message) -> Any:
        proposal = message.read(Proposal)
        if proposal.fingerprint != self.fingerprint:
            raise RefusedError("backbone", "another backbone")
        if self.number == 0 or proposal.incarnation != (self.proposal and self.proposal.incarnation):
            pieces = self.saved.get(proposal.step, [])
            if proposal.step and not pieces:
                raise RefusedError("no_state", f"no step {proposal.step}, only {sorted(self.saved)}")
            self.restart()
            self.proposal, self.step, self.number = proposal, proposal.step, next(self._numbers)
            self.layers = proposal.body(self.body.backbone.shape)
            self._start(pieces)
        terms = Terms(
            session=self.number,
            step=self.step,
            policy="fake",
            forward_bytes=1,
            backward_bytes=1,
            returns_body=self.returns_body,
        )
        return terms, None, ()

    def _start(self, pieces: list[Piece]) -> None:
        own = self.proposal
        assert own is not None
        spec, steps = own.adapter_spec(), own.total_steps
        self.body.add("one", spec, own.training, self.layers, steps, pieces)

    def _upload(self, message: Message) -> Any:
        assert self.step == 0 and self.proposal is not None and self.proposal.uploads
        self.body.remove("one")
        self._start(list(message.pieces))
        return Fields(), None, ()

    def _apply_decision(self, message: Message) -> None:
        previous = message.read(WithPrevious).previous
        if previous is not None and previous.step == self.step:
            self.pending.clear()
            self.body.update("one", previous.step, previous.norm, previous.skip)
            self.step += not previous.skip
        if message.step != self.step:
            raise RefusedError("step", f"{message.kind.name} of step {message.step} at step {self.step}")

    def _forward(self, message: Message) -> Any:
        self._apply_decision(message)
        assert self.proposal is not None and message.tensor is not None
        fields = message.read(Forward)
        lengths, count_, graph = fields.lengths, message.tensor.shape[0], bool(message.flags)
        own, training = self.proposal, Flags.TRAINING in message.flags
        assert sum(lengths) == count_ <= (own.train_rows if training else own.rows)
        assert len(lengths) <= own.sequences and max(lengths) <= own.longest
        rows = Rows(
            "one",
            tuple(lengths),
            tuple(fields.ids),
            self.step,
            training,
            message.tensor.to(self.dtype),
            Flags.NEEDS_INPUT in message.flags,
        )
        (output,), kept = self.body.forward([rows], self.layers, graph)
        if kept is not None:
            self.pending[message.operation] = rows, kept
        return Output(computed_s=0.25, waited_s=0.5), self._sent(output, message), ()

    def _backward(self, message: Message) -> Any:
        assert message.tensor is not None
        rows, kept = self.pending.pop(message.read(Backward).forward)
        (made,) = self.body.backward(kept, [message.tensor.to(self.dtype)])
        square = self.body.squared_norm("one", rows.step) if Flags.LAST in message.flags else None
        return Gradient(squared_norm=square), None if made is None else self._sent(made, message), ()

    def _state(self, message: Message) -> Any:
        self._apply_decision(message)
        kept = {step: self.saved[step] for step in message.read(State).keep if step in self.saved}
        self.saved = {**kept, self.step: self.body.state("one")}
        pieces = self.saved[self.step] if self.returns_body else []
        return StateReply(total=len(pieces)), None, pieces

    def _leave(self, message: Message) -> Any:
        self._apply_decision(message)
        self.left.append(message.read(Leave).finished)
        self.restart()
        return Fields(), None, ()

    @staticmethod
    def _sent(tensor: Tensor, message: Message) -> Tensor:
        assert message.tensor is not None
        return tensor.to(message.tensor.dtype)


@dataclass
class FakeTransport:
    """A connection to a `FakeServer`; it breaks when the server dies."""

    server: FakeServer
    limits: Limits = field(default_factory=Limits)
    on_reconnect: Callable[[Callable[[Message], Message]], None] | None = None
    gives_up: Callable[[], bool] | None = None
    closed: bool = False

    def call(self, message: Message, deadline_s: float) -> Message:
        """See `Transport.call`."""
        assert not self.closed
        if self.server.dies(message):
            self.server.restart()
            if self.on_reconnect is not None:
                self.on_reconnect(self._exchange)
        return self._exchange(message)

    def _exchange(self, message: Message) -> Message:
        reply = self.server.serve(message)
        assert reply.kind in self.limits.kinds and reply.dtype in (Dtype.NONE, self.limits.dtype)
        if reply.tensor is not None:
            assert reply.tensor.shape[0] <= self.limits.rows and reply.tensor.shape[1] == self.limits.width
        assert sum(piece.tensor.nbytes for piece in reply.pieces) <= self.limits.piece_bytes
        return reply

    def close(self) -> None:
        """See `Transport.close`."""
        self.closed = True
