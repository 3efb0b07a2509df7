"""Messages as frames of at most 1 MiB, and the assembly of frames into messages.

Each frame but a message's last is full. So the header tells the length of every frame that follows, and a frame that
is lost, doubled, reordered, truncated or too long is noticed when it arrives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_mux.errors import UserError
from megatron_mux.split.protocol import tensors
from megatron_mux.split.protocol.messages import Message, Upload, parse
from megatron_mux.split.protocol.pieces import PieceEntry
from megatron_mux.split.protocol.wire import HEADER_BYTES, Dtype, Header, Limits, RefusedError, WireError

FRAME_BYTES = 1 << 20
"""Largest frame."""

_NUMBER = struct.Struct("<I")
"""The number of a frame in its message, at the beginning of each frame but the first."""


def frames(message: Message) -> Iterator[bytes]:
    """The frames of a message. Tensors are encoded now; each frame is a copy of its part, made when it is needed.

    Raises:
        WireError: The message does not fit the protocol.
    """
    fields, body = message.fields, list[memoryview]()
    rows = width = 0
    if message.tensor is not None:
        rows, width = message.tensor.shape
        body = [tensors.encode(message.tensor, message.dtype)]
    elif message.pieces:
        fields = fields.model_copy(update={"pieces": list(map(PieceEntry.of, message.pieces))})
        body = tensors.encode_pieces(message.pieces)
    text = fields.model_dump_json().encode() if type(fields).model_fields else b""
    header = Header(
        kind=message.kind,
        dtype=message.dtype,
        flags=message.flags,
        session=message.session,
        step=message.step,
        operation=message.operation,
        json_bytes=len(text),
        tensor_bytes=sum(map(len, body)),
        rows=rows,
        width=width,
    )
    return _cut(header, [memoryview(text), *body])


def _cut(header: Header, body: Sequence[memoryview]) -> Iterator[bytes]:
    held: list[bytes | memoryview] = [header.pack()]
    room, number = FRAME_BYTES - HEADER_BYTES, 0
    for piece in body:
        while piece:
            if not room:
                yield b"".join(held)
                number += 1
                held, room = [_NUMBER.pack(number)], FRAME_BYTES - _NUMBER.size
            part, piece = piece[:room], piece[room:]
            held.append(part)
            room -= len(part)
    yield b"".join(held)


class Assembly:
    """A message that is being received. Allocates `header.memory` bytes at most, so check the header before.

    Args:
        header: Of the message's first frame.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._json = bytearray(header.json_bytes)
        self._tensors = np.empty(header.tensor_bytes, np.uint8)
        self._received = 0
        self._frames = 0

    def add(self, frame: bytes) -> bool:
        """Take the next frame, the first included.

        Returns:
            Whether the message is complete.

        Raises:
            WireError: It is not the frame that has to come next.
        """
        header, name = self._header, self._header.kind.name
        if self._frames == 0:
            start = HEADER_BYTES
        else:
            start = _NUMBER.size
            number = _NUMBER.unpack_from(frame)[0] if len(frame) >= start else -1
            if number != self._frames:
                text = f"Frame {self._frames} of {name} was expected, not frame {number}."
                raise WireError("frame", text, retry=True)
        missing = header.json_bytes + header.tensor_bytes - self._received
        expected = min(FRAME_BYTES, start + missing)
        if len(frame) != expected:
            text = f"Frame {self._frames} of {name} has {len(frame)} bytes instead of {expected}."
            raise WireError("frame", text, retry=True)
        self._fill(memoryview(frame)[start:])
        self._frames += 1
        return missing == expected - start

    def _fill(self, payload: memoryview) -> None:
        json_left = max(0, self._header.json_bytes - self._received)
        text, values = payload[:json_left], payload[json_left:]
        if text:
            self._json[self._received : self._received + len(text)] = text
        if values:
            at = self._received + len(text) - self._header.json_bytes
            self._tensors.data[at : at + len(values)] = values
        self._received += len(payload)

    def message(self, limits: Limits) -> Message:
        """Decode the complete message.

        Raises:
            RefusedError: Its JSON is not what its kind has, or its tensors fail the limits' checks.
        """
        header = self._header
        fields = parse(header.kind, self._json)
        tensor, pieces = None, []
        if header.dtype is not Dtype.NONE:
            tensor = tensors.decode(self._tensors, header.rows, header.width, header.dtype, limits)
        elif isinstance(fields, Upload):
            try:
                pieces = tensors.decode_pieces(fields.pieces, self._tensors, limits)
            except RefusedError:
                raise
            except UserError as error:
                raise RefusedError("pieces", str(error)) from None
        return Message(
            kind=header.kind,
            session=header.session,
            step=header.step,
            operation=header.operation,
            flags=header.flags,
            fields=fields,
            tensor=tensor,
            dtype=header.dtype,
            pieces=pieces,
        )
