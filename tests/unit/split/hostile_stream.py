"""Streams of clients that keep to no rule: whatever bytes a test wants, and what the server made of them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from typing import Any

import grpc
import torch
from torch import Tensor

from megatron_mux.split.protocol.agreement import PROTOCOL, Fields
from megatron_mux.split.protocol.framing import FRAME_BYTES, Assembly, frames
from megatron_mux.split.protocol.messages import Message, Refusal
from megatron_mux.split.protocol.wire import METHOD, Dtype, Flags, Header, Kind, Limits

HIDDEN = 32
ROWS = 12
LARGE_ROWS = 8300
"""Rows of an evaluation whose message has two frames."""
SECONDS = 60.0
"""Longest time that a case may take: a server that does not answer is found by it."""

_HEADER = struct.Struct("<4sBBHQIIIQII20s")
PROPOSAL: dict[str, Any] = {
    "task": "task",
    "fingerprint": "fingerprint",
    "cut_front": 1,
    "cut_back": 1,
    "wire": "f32",
    "adapter": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]},
    "training": {"max_steps": 9, "learning_rate": 0.05},
    "total_steps": 9,
    "train_rows": ROWS,
    "rows": LARGE_ROWS,
    "sequences": LARGE_ROWS // ROWS + 1,
    "longest": ROWS,
    "run": "12" * 8,
    "incarnation": "ab" * 8,
}
_numbers = count()
TRAINING = Flags.TRAINING | Flags.NEEDS_INPUT


class Ended(Exception):
    """The server ended the stream where a case expected an answer."""


class AnyFields(Fields):
    """JSON that follows no schema."""

    content: dict[str, Any]

    def model_dump_json(self, **options: Any) -> str:
        return json.dumps(self.content)


def packed(kind: int, **values: int) -> bytes:
    """A header with any values, which nobody has checked."""
    names = ("dtype", "flags", "session", "step", "operation", "json_bytes", "tensor_bytes", "rows", "width")
    return _HEADER.pack(b"MXS1", kind, *(values.get(name, 0) for name in names), bytes(20))


def hello(**changes: Any) -> Message:
    """A HELLO with some fields changed."""
    return Message(Kind.HELLO, fields=AnyFields(content={"protocol": PROTOCOL, **PROPOSAL, **changes}))


@dataclass
class Stream:
    """A stream.

    Attributes:
        channel: Its connection.
        reads: Whether it reads what the server says.
        outcome: What the server said last: a kind of message, `ERROR CODE`, or a status of gRPC.
        session: The number that WELCOME gave.
    """

    channel: grpc.Channel
    reads: bool = True
    outcome: str = "nothing"
    session: int = 0
    operation: int = 0
    _outbox: SimpleQueue[bytes | None] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        self.incarnation = f"{next(_numbers):016x}"
        self._call = self.channel.stream_stream(METHOD)(
            iter(self._outbox.get, None), timeout=SECONDS if self.reads else None
        )

    def send(self, *parts: bytes | Message) -> None:
        """Send frames, or the frames of messages."""
        for part in parts:
            for frame in [bytes(part)] if not isinstance(part, Message) else frames(part):
                self._outbox.put(frame)

    def ask(self, message: bytes | Message) -> Message:
        """Send a message; returns the reply.

        Raises:
            Ended: There is none, or ERROR.
        """
        self.send(message)
        reply = self._next()
        if reply is None or reply.kind is Kind.ERROR:
            raise Ended
        return reply

    def join(self, **changes: Any) -> None:
        """Join as PROPOSAL says."""
        self.session = self.ask(hello(**{"incarnation": self.incarnation, **changes})).session

    def request(self, kind: Kind, fields: dict[str, Any] | None = None, **others: Any) -> Message:
        """A message with the next number."""
        self.operation += 1
        values = {"session": self.session, "operation": self.operation, **others}
        return Message(kind, fields=AnyFields(content=fields or {}), **values)

    def forward(self, hidden: Tensor | None = None, flags: Flags = TRAINING, **fields: Any) -> Message:
        """A FORWARD that is right but for what is given."""
        tensor = torch.randn(ROWS, HIDDEN) if hidden is None else hidden
        lengths = [ROWS] * (len(tensor) // ROWS) + ([len(tensor) % ROWS] if len(tensor) % ROWS else [])
        right = {"lengths": lengths, "ids": list(range(len(lengths)))}
        return self.request(Kind.FORWARD, {**right, **fields}, flags=flags, tensor=tensor, dtype=Dtype.F32)

    def backward(self, forward: int, gradient: Tensor | None = None) -> Message:
        """A BACKWARD that is right but for what is given."""
        tensor = torch.randn(ROWS, HIDDEN) if gradient is None else gradient
        flags = Flags.LAST | Flags.NEEDS_INPUT
        return self.request(Kind.BACKWARD, {"forward": forward}, flags=flags, tensor=tensor, dtype=Dtype.F32)

    def finish(self) -> str:
        """End the stream and read what the server still says; returns the outcome."""
        self._outbox.put(None)
        while self._next() is not None:
            pass
        return self.outcome

    def cancel(self) -> None:
        """Leave without a word."""
        self._outbox.put(None)
        self._call.cancel()

    def _next(self) -> Message | None:
        try:
            frame = next(self._call)
            assembly = Assembly(Header.read(frame))
            while not assembly.add(frame):
                frame = next(self._call)
            reply = assembly.message(Limits(finite=False))
        except StopIteration:
            return None
        except grpc.RpcError as error:
            self.outcome = error.code().name
            return None
        self.outcome = f"ERROR {reply.read(Refusal).code}" if reply.kind is Kind.ERROR else reply.kind.name
        return reply


def two_frames(stream: Stream) -> list[bytes]:
    """The frames of a right message that has two of them."""
    made = list(frames(stream.forward(torch.randn(LARGE_ROWS, HIDDEN), Flags.NONE)))
    assert len(made) == 2 and len(made[0]) == FRAME_BYTES
    return made
