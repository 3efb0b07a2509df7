"""The fixed header in front of each message between a client and a server of split fine-tuning, and its limits.

`docs/split-protocol.md` describes the format. A receiver parses the header, compares it with its `Limits`, and only
then allocates memory for the rest (`framing.Assembly`).
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from enum import IntEnum, IntFlag
from typing import Any

from megatron_mux.errors import UserError

METHOD = "/megatron_mux.Split/Session"
"""The gRPC method: a bidirectional stream of frames."""

HEADER_BYTES = 64
_HEADER = struct.Struct("<4sBBHQIIIQII20s")
_MAGIC = b"MXS1"
_RESERVED = bytes(20)

_JSON_BYTES = 64 << 10
_LONG_JSON_BYTES = 1 << 20
"""At joining, and for indices of pieces."""
_JSON_EXPANSION = 64
"""Most bytes of memory that a byte of JSON becomes once parsed, pieces of one value included."""
_LARGEST_TENSORS = 1 << 40
"""Bytes; any limit of a receiver is smaller."""


class Kind(IntEnum):
    """What a message asks or answers."""

    HELLO = 1
    WELCOME = 2
    UPLOAD = 3
    STORED = 4
    FORWARD = 5
    OUTPUT = 6
    BACKWARD = 7
    GRADIENT = 8
    STATE = 9
    STATE_REPLY = 10
    LEAVE = 11
    BYE = 12
    PING = 13
    PONG = 14
    ERROR = 15


REPLIES = {
    Kind.HELLO: Kind.WELCOME,
    Kind.UPLOAD: Kind.STORED,
    Kind.FORWARD: Kind.OUTPUT,
    Kind.BACKWARD: Kind.GRADIENT,
    Kind.STATE: Kind.STATE_REPLY,
    Kind.LEAVE: Kind.BYE,
    Kind.PING: Kind.PONG,
}
"""The reply to each kind of request."""

_NEEDS_TENSOR = {Kind.FORWARD, Kind.OUTPUT, Kind.BACKWARD}
_MAY_HAVE_TENSOR = {*_NEEDS_TENSOR, Kind.GRADIENT}
_WITH_PIECES = {Kind.UPLOAD, Kind.STATE_REPLY}
_WITH_LONG_JSON = {Kind.HELLO, Kind.WELCOME, *_WITH_PIECES}


class Flags(IntFlag):
    """Properties of a FORWARD or BACKWARD.

    Attributes:
        TRAINING: A backward will follow, and dropout is on.
        LAST: The last backward of an optimizer step: `squared_norm` of the reply's JSON is that of the whole step.
        NEEDS_INPUT: The reply has the gradient of the hidden states.
    """

    NONE = 0
    TRAINING = 1
    LAST = 2
    NEEDS_INPUT = 4


class Dtype(IntEnum):
    """How the values of a tensor travel. I8: a row is its fp32 scale, then its int8 values."""

    NONE = 0
    F32 = 1
    BF16 = 2
    F16 = 3
    I8 = 4
    F64 = 5

    def row_bytes(self, width: int) -> int:
        """Bytes on the wire of a row of `width` values."""
        return _VALUE_BYTES[self] * width + (4 if self is Dtype.I8 else 0)


_VALUE_BYTES = {Dtype.NONE: 0, Dtype.F32: 4, Dtype.BF16: 2, Dtype.F16: 2, Dtype.I8: 1, Dtype.F64: 8}


class RefusedError(UserError):
    """A request that the other end refuses; a server raises it to answer with ERROR and end the stream.

    Args:
        code: Name of the reason, for programs.
        message: Sentences for people.
        retry: Whether the same request may succeed later.
    """

    def __init__(self, code: str, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.code, self.retry = code, retry

    def __reduce__(self) -> tuple[type[RefusedError], tuple[Any, ...]]:
        return type(self), (self.code, str(self), self.retry)


class WireError(RefusedError):
    """A frame or message that breaks the protocol or the receiver's limits; it ends the stream.

    Args:
        code: `header`, `kind`, `dtype`, `size`, `frame`, `json`, `index`, `finite` or `norm`.
        message: What was received, and what was expected.
        retry: Whether it may be a fault of the connection: the request may be right when it comes again.
    """


@dataclass(frozen=True)
class Limits:
    """What a receiver accepts; everything else is refused before memory is allocated for it.

    Attributes:
        kinds: Kinds of messages.
        rows: Most rows T of a tensor `[T, H]`.
        width: Its H, exactly.
        dtype: Its wire dtype, exactly.
        piece_bytes: Most bytes of all pieces of a message.
        finite: Whether to refuse tensors with values that are not finite.
        norm: Largest L2 norm of a row of a tensor `[T, H]`; None: no limit.
    """

    kinds: frozenset[Kind] = frozenset()
    rows: int = 0
    width: int = 0
    dtype: Dtype = Dtype.NONE
    piece_bytes: int = 0
    finite: bool = True
    norm: float | None = None


@dataclass(frozen=True)
class Header:
    """The first 64 bytes of a message.

    Attributes:
        kind, dtype, flags, session, step, operation: See `messages.Message`.
        json_bytes: Bytes of JSON after the header.
        tensor_bytes: Bytes of the tensor or of pieces after the JSON.
        rows, width: Shape of the tensor `[T, H]`; 0 without one.
    """

    kind: Kind
    dtype: Dtype
    flags: Flags
    session: int
    step: int
    operation: int
    json_bytes: int
    tensor_bytes: int
    rows: int
    width: int

    def __post_init__(self) -> None:
        """Compare the sizes with each other and with what the kind may have.

        Raises:
            WireError: They do not fit.
        """
        name = self.kind.name
        most = _LONG_JSON_BYTES if self.kind in _WITH_LONG_JSON else _JSON_BYTES
        most = 0 if self.kind in (Kind.PING, Kind.PONG) else most
        if self.json_bytes > most:
            raise WireError(
                "size", f"{name} has {self.json_bytes} bytes of JSON; at most {most} are allowed."
            )
        if self.dtype is Dtype.NONE and self.kind in _NEEDS_TENSOR:
            raise WireError("dtype", f"{name} needs a tensor, with its wire dtype.")
        if self.dtype is not Dtype.NONE and self.kind not in _MAY_HAVE_TENSOR:
            raise WireError("dtype", f"{name} has no tensor [T, H], and so no wire dtype.")
        if self.dtype is Dtype.NONE and self.kind in _WITH_PIECES:
            right = self.rows == self.width == 0 and self.tensor_bytes <= _LARGEST_TENSORS
        else:
            right = self.tensor_bytes == self.rows * self.dtype.row_bytes(self.width)
            right = right and (self.rows > 0 and self.width > 0) == (self.dtype is not Dtype.NONE)
        if not right:
            raise WireError(
                "size",
                f"{name} has {self.tensor_bytes} bytes of tensors, which is not the size of {self.rows} rows of "
                f"{self.width} values in {self.dtype.name}.",
            )

    @classmethod
    def read(cls, frame: bytes) -> Header:
        """Parse the first frame of a message.

        Raises:
            WireError: It is no header, or its sizes do not fit.
        """
        if len(frame) < HEADER_BYTES:
            text = f"A message begins with {HEADER_BYTES} bytes of header, not {len(frame)}."
            raise WireError("header", text, retry=True)
        magic, kind, dtype, flags, *numbers, reserved = _HEADER.unpack_from(frame)
        if magic != _MAGIC:
            raise WireError("header", f"A message begins with {_MAGIC!r}, not {magic!r}.", retry=True)
        if kind not in _KINDS:
            raise WireError("kind", f"There is no kind {kind} of messages.")
        if dtype not in _DTYPES:
            raise WireError("dtype", f"There is no wire dtype {dtype}.")
        if flags & ~_ALL_FLAGS or reserved != _RESERVED:
            raise WireError("header", "Reserved bits of the header must be 0.")
        return cls(Kind(kind), Dtype(dtype), Flags(flags), *numbers)

    def pack(self) -> bytes:
        """The 64 bytes."""
        return _HEADER.pack(_MAGIC, *astuple(self), _RESERVED)

    def check(self, limits: Limits) -> None:
        """Compare with what a receiver accepts, before it allocates anything.

        Raises:
            WireError: The message is beyond the limits.
        """
        name = self.kind.name
        if self.kind not in limits.kinds:
            raise WireError("kind", f"{name} is not accepted now.")
        if self.dtype is Dtype.NONE:
            if self.tensor_bytes > limits.piece_bytes:
                raise WireError(
                    "size",
                    f"{name} has {self.tensor_bytes} bytes of tensors; at most {limits.piece_bytes} are accepted.",
                )
        elif self.dtype is not limits.dtype:
            raise WireError(
                "dtype", f"{name} has the wire dtype {self.dtype.name}; {limits.dtype.name} was agreed."
            )
        elif self.width != limits.width or self.rows > limits.rows:
            raise WireError(
                "size",
                f"{name} has a tensor [{self.rows}, {self.width}]; at most {limits.rows} rows of {limits.width} "
                "values are accepted.",
            )

    @property
    def memory(self) -> int:
        """Most bytes that receiving and decoding the message takes."""
        if self.dtype is Dtype.I8:
            decoded = self.rows * Dtype.F32.row_bytes(self.width)
        else:
            decoded = self.tensor_bytes if self.dtype is Dtype.NONE else 0
        return _JSON_EXPANSION * self.json_bytes + self.tensor_bytes + decoded


_KINDS = frozenset(Kind)
_DTYPES = frozenset(Dtype)
_ALL_FLAGS = sum(Flags)
