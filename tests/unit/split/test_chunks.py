"""Messages survive being cut and assembled; frames that are lost, doubled, reordered or changed are refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.split.protocol import chunks
from megatron_mux.split.protocol.chunks import FRAME_BYTES, Assembly, frames
from megatron_mux.split.protocol.wire import Dtype, Flags, Header, Kind, Limits, Message, WireError

LIMITS = Limits(kinds=frozenset(Kind), rows=64, width=16, dtype=Dtype.F32, named_bytes=1 << 16)


@pytest.fixture(autouse=True, scope="module")
def small_frames() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "FRAME_BYTES", 256)
        yield


def forward(rows: int = 20, **fields: Any) -> Message:
    tensor = torch.arange(16.0 * rows).view(rows, 16)
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
    with pytest.raises(WireError) as refused:
        assembled(parts, limits)
    return refused.value.code


def assert_same(found: Message, sent: Message) -> None:
    assert replace(found, tensor=None, tensors={}) == replace(sent, tensor=None, tensors={})
    assert (found.tensor is None) == (sent.tensor is None)
    if found.tensor is not None and sent.tensor is not None:
        assert torch.equal(found.tensor, sent.tensor)
    assert list(found.tensors) == list(sent.tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in sent.tensors.items())


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "tensors"), values, max_size=4)


@given(rows=st.integers(0, 40), fields=objects, long=st.integers(0, 600))
def test_messages_survive(rows: int, fields: dict[str, Any], long: int) -> None:
    fields["long"] = "x" * long
    for sent in (
        forward(rows + 1, **fields),
        Message(Kind.HELLO, fields=fields),
        Message(
            Kind.UPLOAD,
            1,
            fields=fields,
            tensors={"a": torch.rand(rows), "b": torch.rand(rows, 7).bfloat16()},
        ),
    ):
        parts = list(frames(sent))
        assert all(len(part) == 256 for part in parts[:-1]) and len(parts[-1]) <= 256
        assert_same(assembled(parts), sent)


def test_a_message_is_sent_again_identically() -> None:
    assert list(frames(forward(a=1))) == list(frames(forward(a=1)))


def test_frames_of_a_megabyte() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "FRAME_BYTES", FRAME_BYTES)
        sent = Message(Kind.OUTPUT, tensor=torch.rand(1024, 1024), dtype=Dtype.F32)
        parts = list(frames(sent))
        assert [len(part) for part in parts[:-1]] == [1 << 20] * 4
        assert_same(assembled(parts, replace(LIMITS, rows=1024, width=1024)), sent)


@given(st.data())
def test_frames_out_of_order(data: st.DataObject) -> None:
    parts = list(frames(forward(a="b" * 300)))
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
    upload = Message(
        Kind.UPLOAD, 1, fields={"a": [1.5]}, tensors={"a": torch.rand(9), "b": torch.rand(70) > 0.5}
    )
    parts = [
        bytearray(part) for part in frames(data.draw(st.sampled_from([forward(7, lengths=[3, 4]), upload])))
    ]
    for _ in range(data.draw(st.integers(1, 4))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    try:
        assembled(map(bytes, parts))
    except WireError as error:
        assert error.code and str(error)


def with_json(text: bytes, kind: Kind = Kind.HELLO) -> Iterator[bytes]:
    header = Header(kind, Dtype.NONE, Flags.NONE, 0, 0, 0, len(text), 0, 0, 0)
    return chunks._cut(header, [memoryview(text)])


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
    text = b'{"tensors":[["a","f32",[250000]]]}'
    assert code_of(with_json(text)) == code_of(with_json(text, Kind.UPLOAD)) == "index"
    sent = replace(forward(), fields={"tensors": [["a", "f32", [320]]]})
    assert code_of(frames(sent)) == "index"
    silent = Header(Kind.UPLOAD, Dtype.NONE, Flags.NONE, 0, 0, 0, 0, 8, 0, 0)
    assert code_of(chunks._cut(silent, [memoryview(bytes(8))])) == "index"


def test_what_cannot_be_sent() -> None:
    with pytest.raises(ValueError, match="JSON"):
        frames(Message(Kind.HELLO, fields={"norm": float("nan")}))
    with pytest.raises(WireError, match="JSON"):
        frames(Message(Kind.STATE, fields={"text": "x" * 70_000}))
    with pytest.raises(WireError, match="needs a tensor"):
        frames(Message(Kind.FORWARD))


WORST_JSON = {
    "lists": b"[" + b"[]," * 20_000 + b"[]]",
    "objects": b"[" + b"{}," * 20_000 + b"{}]",
    "numbers": b"[" + b"1e9," * 15_000 + b"1e9]",
    "keys": b"{" + b",".join(b'"%x":1' % number for number in range(5000)) + b"}",
    "texts": b"[" + b",".join(b'"%x"' % number for number in range(8000)) + b"]",
}


@pytest.mark.parametrize("worst", WORST_JSON.values(), ids=WORST_JSON)
def test_memory_of_parsed_json_is_bounded(worst: bytes) -> None:
    text = b'{"a":' + worst + b"}"
    parts = list(with_json(text))
    tracemalloc.start()
    try:
        assembled(parts)
        assert tracemalloc.get_traced_memory()[1] < Header.read(parts[0]).memory
    finally:
        tracemalloc.stop()


def test_memory_of_an_assembly_is_what_the_header_says() -> None:
    limits = replace(LIMITS, rows=1 << 20)
    parts = list(frames(forward(1 << 14, a=1)))  # 1 MiB
    tracemalloc.start()
    try:
        found = assembled(parts, limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.tensor is not None and peak < Header.read(parts[0]).memory + 200_000
