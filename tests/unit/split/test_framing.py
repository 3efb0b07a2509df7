"""Messages survive being cut and assembled; frames that are lost, doubled, reordered or changed are refused."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.split.protocol import framing
from megatron_mux.split.protocol.framing import FRAME_BYTES, Assembly, frames
from megatron_mux.split.protocol.messages import Forward, Leave, Message, Output, Upload
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import (
    Dtype,
    Flags,
    Header,
    Kind,
    Limits,
    RefusedError,
    WireError,
)
from tests.unit.split.hostile_stream import AnyFields, hello

LIMITS = Limits(kinds=frozenset(Kind), rows=64, width=16, dtype=Dtype.F32, piece_bytes=1 << 16)


@pytest.fixture(autouse=True, scope="module")
def small_frames() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "FRAME_BYTES", 256)
        yield


def forward(rows: int = 20, sequences: int = 1) -> Message:
    tensor = torch.arange(16.0 * rows).view(rows, 16)
    fields = Forward(lengths=[rows] * sequences, ids=list(range(sequences)))
    return Message(Kind.FORWARD, 5, 4, 3, Flags.TRAINING, fields, tensor, Dtype.F32)


def assembled(parts: Iterable[bytes], limits: Limits = LIMITS) -> Message:
    """The message of some frames, which must be all that it needs."""
    first, *others = parts
    header = Header.read(first)
    header.check(limits)
    assembly = Assembly(header)
    complete = [assembly.add(frame) for frame in (first, *others)]
    if complete != [False] * len(others) + [True]:
        raise WireError("frame", "lost or left over")
    return assembly.message(limits)


def code_of(parts: Iterable[bytes], limits: Limits = LIMITS) -> str:
    with pytest.raises(RefusedError) as refused:
        assembled(parts, limits)
    return refused.value.code


def assert_same(found: Message, sent: Message) -> None:
    assert replace(found, tensor=None, pieces=(), fields=sent.fields) == replace(sent, tensor=None, pieces=())
    assert (found.tensor is None) == (sent.tensor is None)
    if found.tensor is not None and sent.tensor is not None:
        assert found.fields == sent.fields and torch.equal(found.tensor, sent.tensor)
    for one, other in zip(found.pieces, sent.pieces, strict=True):
        assert replace(one, tensor=other.tensor) == other and torch.equal(one.tensor, other.tensor)


@given(rows=st.integers(0, 40), sequences=st.integers(1, 300))
def test_messages_survive(rows: int, sequences: int) -> None:
    pieces = [
        Piece("a", "value", (rows,), torch.rand(rows)),
        Piece("b" * sequences, "extra", (9, 7), torch.rand(4, 7).bfloat16(), 0, ((0, 3), (8, 9))),
    ]
    for sent in (forward(rows + 1, sequences), Message(Kind.UPLOAD, 1, fields=Upload(), pieces=pieces)):
        parts = list(frames(sent))
        assert all(len(part) == 256 for part in parts[:-1]) and len(parts[-1]) <= 256
        assert_same(assembled(parts), sent)


def test_a_message_is_sent_again_identically() -> None:
    assert list(frames(forward())) == list(frames(forward()))


def test_frames_of_a_megabyte() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "FRAME_BYTES", FRAME_BYTES)
        sent = Message(Kind.OUTPUT, fields=Output(), tensor=torch.rand(1024, 1024), dtype=Dtype.F32)
        parts = list(frames(sent))
        assert [len(part) for part in parts[:-1]] == [1 << 20] * 4
        assert_same(assembled(parts, replace(LIMITS, rows=1024, width=1024)), sent)


@given(st.data())
def test_frames_out_of_order(data: st.DataObject) -> None:
    parts = list(frames(forward(sequences=60)))
    at = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.integers(0, len(parts) - 1).filter(lambda number: number != at))
    swapped = list(parts)
    swapped[at], swapped[other] = parts[other], parts[at]
    part = parts[at]
    for wrong in (
        [*parts[:at], *parts[at + 1 :]],  # lost
        [*parts[: at + 1], *parts[at:]],  # doubled
        swapped,
        [*parts[:at], part[:-1], *parts[at + 1 :]],  # truncated
        [*parts[:at], part + b"x", *parts[at + 1 :]],  # too long
        [*parts[:at], b"", *parts[at + 1 :]],
        [*parts[:at], parts[0], *parts[at:]],  # the next message's
    ):
        assert code_of(wrong) in ("frame", "header")


@given(st.data())
def test_changed_bytes_never_crash(data: st.DataObject) -> None:
    pieces = [Piece("a", "value", (9,), torch.rand(9)), Piece("b", "extra", (70,), torch.rand(70) > 0.5)]
    upload = Message(Kind.UPLOAD, 1, fields=Upload(), pieces=pieces)
    parts = [bytearray(part) for part in frames(data.draw(st.sampled_from([forward(7, 2), upload])))]
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        assembled(map(bytes, parts))
    except RefusedError as error:
        assert error.code and str(error)


def with_json(text: bytes, kind: Kind = Kind.HELLO) -> Iterator[bytes]:
    header = Header(kind, Dtype.NONE, Flags.NONE, 0, 0, 0, len(text), 0, 0, 0)
    return framing._cut(header, [memoryview(text)])


BAD_JSON = [
    b"{",
    b"[1]",
    b"7",
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"a":' + b"[" * 60_000,
    b"\0" * 9,
]


@pytest.mark.parametrize("text", BAD_JSON, ids=range(len(BAD_JSON)))
def test_bad_json(text: bytes) -> None:
    assert code_of(with_json(text)) == "json"


def test_json_that_tells_of_tensors_where_there_are_none() -> None:
    text = b'{"pieces":[{"key":"a","kind":"value","dtype":"f32","shape":[250000]}]}'
    assert code_of(with_json(text)) == "proposal" and code_of(with_json(text, Kind.UPLOAD)) == "index"
    silent = Header(Kind.UPLOAD, Dtype.NONE, Flags.NONE, 0, 0, 0, 0, 8, 0, 0)
    assert code_of(framing._cut(silent, [memoryview(bytes(8))])) == "index"


@pytest.mark.parametrize(("protocol", "unknown"), [(2, 1), (4, 80)])
def test_a_client_of_another_protocol_is_refused_by_name(protocol: int, unknown: int) -> None:
    """Whatever else differs, and however much of it."""
    said = f"client speaks version {protocol} of the protocol, the server version 3: install the same version"
    with pytest.raises(RefusedError, match=said) as refused:
        assembled(frames(hello(protocol=protocol, **{f"field_{i}": True for i in range(unknown)})))
    assert refused.value.code == "proposal"


def test_what_cannot_be_sent() -> None:
    with pytest.raises(WireError, match="JSON"):
        frames(Message(Kind.LEAVE, fields=AnyFields(content={"text": "x" * 70_000})))
    with pytest.raises(WireError, match="needs a tensor"):
        frames(Message(Kind.FORWARD, fields=Leave()))


@pytest.mark.parametrize("wrong", [{}, {"lengths": [0] * 5000, "ids": []}, {f"f{i}": 0 for i in range(5000)}])
def test_json_with_many_mistakes_costs_little(wrong: dict[str, object]) -> None:
    text = json.dumps(wrong).encode()
    header = Header(Kind.FORWARD, Dtype.F32, Flags.NONE, 0, 0, 0, len(text), 64, 1, 16)
    assert code_of(framing._cut(header, [memoryview(text), memoryview(bytes(64))])) == "json"


WORST_JSON = {
    "lists": b"[" + b"[]," * 20_000 + b"[]]",
    "objects": b"[" + b"{}," * 20_000 + b"{}]",
    "numbers": b"[" + b"1e9," * 15_000 + b"1e9]",
    "keys": b"{" + b",".join(b'"%x":1' % number for number in range(5000)) + b"}",
    "texts": b"[" + b",".join(b'"%x"' % number for number in range(8000)) + b"]",
}


@pytest.mark.parametrize("worst", WORST_JSON.values(), ids=WORST_JSON)
def test_memory_of_parsed_json_is_bounded(worst: bytes) -> None:
    text = b'{"adapter":{"a":' + worst + b"}}"
    parts = list(with_json(text))
    tracemalloc.start()
    try:
        assert code_of(parts) == "proposal"
        assert tracemalloc.get_traced_memory()[1] < Header.read(parts[0]).memory
    finally:
        tracemalloc.stop()


def test_memory_of_an_assembly_is_what_the_header_says() -> None:
    limits = replace(LIMITS, rows=1 << 20)
    parts = list(frames(forward(1 << 14)))  # 1 MiB
    tracemalloc.start()
    try:
        found = assembled(parts, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tensor is not None and peak < Header.read(parts[0]).memory + 200_000
