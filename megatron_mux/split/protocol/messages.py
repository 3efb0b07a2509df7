"""Messages between a client and a server, and the schema of each kind's JSON: neither end trusts the other's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NoReturn, TypeVar

from pydantic import ConfigDict, FailFast, Field, ValidationError
from torch import Tensor

from megatron_mux.split.protocol.agreement import Count, Fields, Flag, Proposal, Size, Terms, other_version
from megatron_mux.split.protocol.pieces import Piece, PieceEntry
from megatron_mux.split.protocol.wire import HEADER_BYTES, Dtype, Flags, Kind, RefusedError, WireError

_MOST_KEPT = 16
"""Saves that a client may have the server keep."""
_MOST_ERRORS_READ = 64
"""A hostile message may have a mistake in every few bytes; to list them all takes much more memory than the message."""

Real = Annotated[float, Field(strict=True, ge=0)]
Index = Annotated[list[PieceEntry], FailFast()]


class Decision(Fields):
    """What became of an optimizer step, as the client decides for both ends."""

    step: Count
    """Steps done before it."""
    norm: Real
    """Norm of the gradient over both ends."""
    skip: Flag = False
    """Whether neither end steps."""


class WithPrevious(Fields):
    """JSON of a request that can tell the server of the step before."""

    previous: Decision | None = None
    """That step, if the server has not been told of it."""


class Upload(Fields):
    """JSON of an UPLOAD."""

    pieces: Index = []
    """Of the adapter to start from."""


class Forward(WithPrevious):
    """JSON of a FORWARD."""

    lengths: Annotated[list[Size], Field(min_length=1), FailFast()]
    """Tokens of each sequence, in the order of the rows."""
    ids: Annotated[list[Count], FailFast()]
    """Number of each sequence among those of its optimizer step."""


class Backward(Fields):
    """JSON of a BACKWARD."""

    forward: Count
    """The operation of its forward pass."""


class State(WithPrevious):
    """JSON of a STATE."""

    keep: Annotated[list[Count], Field(max_length=_MOST_KEPT)] = []
    """Steps of other saves that the client needs."""
    first: Count = 0
    """Number of pieces that the client has: with 0 the state is saved, then it is sent from there on."""


class Leave(WithPrevious):
    """JSON of a LEAVE."""

    finished: Flag = False
    """Whether the task is done: what the server keeps of it gets a name."""


class Output(Fields):
    """JSON of an OUTPUT."""

    waited_s: Real = 0.0
    """Seconds that the request waited for memory and its turn."""
    computed_s: Real = 0.0
    """Seconds that it was computed."""


class Gradient(Output):
    """JSON of a GRADIENT."""

    squared_norm: Real | None = None
    """Of the server's gradients after the last BACKWARD of a step; null before, or if it is not finite."""


class StateReply(Upload):
    """JSON of a STATE_REPLY, with the pieces from the requested number on."""

    total: Count
    """The number of all pieces."""


class Refusal(Fields):
    """JSON of an ERROR; one of a later version may have more."""

    model_config = ConfigDict(extra="ignore")

    code: str
    """Name of the reason, for programs."""
    message: str
    """Sentences for people."""
    retry: Flag = False
    """Whether the same request may succeed later."""


SCHEMAS: dict[Kind, type[Fields]] = {
    Kind.HELLO: Proposal,
    Kind.WELCOME: Terms,
    Kind.UPLOAD: Upload,
    Kind.STORED: Fields,
    Kind.FORWARD: Forward,
    Kind.OUTPUT: Output,
    Kind.BACKWARD: Backward,
    Kind.GRADIENT: Gradient,
    Kind.STATE: State,
    Kind.STATE_REPLY: StateReply,
    Kind.LEAVE: Leave,
    Kind.BYE: Fields,
    Kind.PING: Fields,
    Kind.PONG: Fields,
    Kind.ERROR: Refusal,
}
T = TypeVar("T", bound=Fields)


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        kind: What it asks or answers.
        session: Number of the session that WELCOME gave, or 0.
        step: The session's optimizer step.
        operation: Number of the request in its step; a reply repeats its request's.
        flags: Properties of a FORWARD or BACKWARD.
        fields: The JSON, as the kind's schema has it.
        tensor: `[T, H]` hidden states or their gradients. A received one has its wire dtype, or float32 for I8.
        dtype: Wire dtype of `tensor`; NONE without one.
        pieces: Of UPLOAD and STATE_REPLY, whose JSON gets their index when they are sent.
    """

    kind: Kind
    session: int = 0
    step: int = 0
    operation: int = 0
    flags: Flags = Flags.NONE
    fields: Fields = field(default_factory=Fields)
    tensor: Tensor | None = None
    dtype: Dtype = Dtype.NONE
    pieces: Sequence[Piece] = ()

    def read(self, schema: type[T]) -> T:
        """The JSON as one of its kind.

        Raises:
            WireError: The message is of a kind with another schema.
        """
        if not isinstance(self.fields, schema):
            raise WireError("kind", f"{self.kind.name} has no {schema.__name__}.")
        return self.fields

    @property
    def wire_bytes(self) -> int:
        """Bytes on the wire of its header and tensors; of the JSON, which is small, none are counted."""
        rows, width = (0, 0) if self.tensor is None else self.tensor.shape
        pieces = sum(piece.tensor.nbytes for piece in self.pieces)
        return HEADER_BYTES + rows * self.dtype.row_bytes(width) + pieces


def parse(kind: Kind, text: bytes | bytearray) -> Fields:
    """Read the JSON of a message.

    Raises:
        RefusedError: It is not what the kind of message has: code `json`, or `proposal` of a HELLO of another version
            or with a wrong field.
    """
    # Not by `model_validate_json`: each of its errors has a copy of all that was sent.
    try:
        fields = json.loads(text, parse_constant=_refuse) if text else {}
    except (ValueError, RecursionError) as error:
        raise WireError("json", f"The JSON cannot be read: {error}.") from None
    if not isinstance(fields, dict):
        raise WireError("json", "The JSON must be an object.")
    if kind is Kind.HELLO and (why := other_version(fields.get("protocol"))):
        raise RefusedError("proposal", why)  # whatever else differs
    try:
        return SCHEMAS[kind].model_validate(fields)
    except ValidationError as error:
        count = error.error_count()
        if count > _MOST_ERRORS_READ:
            raise WireError("json", f"{kind.name}: {count} fields are wrong") from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        if kind is Kind.HELLO:
            raise RefusedError("proposal", why) from None
        raise WireError("json", f"{kind.name}: {why}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
