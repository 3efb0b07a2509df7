"""Headers survive the wire, and whatever else arrives is refused before anything is allocated for it."""

from __future__ import annotations

import copy
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.split.protocol.wire import HEADER_BYTES, Dtype, Flags, Header, Kind, Limits, WireError

FORWARD = Header(Kind.FORWARD, Dtype.BF16, Flags.TRAINING, 7, 3, 1, 40, 10 * 2 * 64, 10, 64)
LIMITS = Limits(
    kinds=frozenset(Kind) - {Kind.BYE}, rows=1024, width=64, dtype=Dtype.BF16, piece_bytes=1 << 20
)
numbers = st.integers(0, (1 << 32) - 1)


def code_of(header: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(WireError) as refused:
        Header.read(header).check(limits)
    return refused.value.code


def changed(position: int, *values: int, of: Header = FORWARD) -> bytes:
    packed = bytearray(of.pack())
    packed[position : position + len(values)] = bytes(values)
    return bytes(packed)


@given(
    kind=st.sampled_from([Kind.FORWARD, Kind.OUTPUT, Kind.BACKWARD, Kind.GRADIENT]),
    dtype=st.sampled_from([dtype for dtype in Dtype if dtype is not Dtype.NONE]),
    flags=st.sampled_from([Flags.NONE, Flags.TRAINING, Flags.LAST | Flags.NEEDS_INPUT]),
    session=st.integers(0, (1 << 64) - 1),
    step=numbers,
    operation=numbers,
    json_bytes=st.integers(0, 1 << 16),
    rows=st.integers(1, 1 << 31),
    width=st.integers(1, 1 << 28),
)
def test_headers_survive(
    kind: Kind,
    dtype: Dtype,
    flags: Flags,
    session: int,
    step: int,
    operation: int,
    json_bytes: int,
    rows: int,
    width: int,
) -> None:
    size = rows * dtype.row_bytes(width)
    header = Header(kind, dtype, flags, session, step, operation, json_bytes, size, rows, width)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES and Header.read(packed) == header


@given(st.binary(max_size=2 * HEADER_BYTES), st.integers(0, HEADER_BYTES - 1), st.binary(max_size=16))
def test_any_bytes_are_a_header_or_refused(noise: bytes, position: int, splice: bytes) -> None:
    mutated = changed(position, *splice)
    for content in (noise, b"MXS1" + noise, mutated):
        try:
            header = Header.read(content)
            header.check(LIMITS)
        except WireError:
            continue
        assert header.tensor_bytes <= LIMITS.piece_bytes and header.json_bytes <= 1 << 20
        assert header.rows <= LIMITS.rows and header.width in (0, LIMITS.width)


def test_what_is_refused() -> None:
    assert code_of(b"") == code_of(FORWARD.pack()[:-1]) == "header"
    assert code_of(changed(3, ord("2"))) == "header"  # another version
    assert code_of(changed(4, 0)) == code_of(changed(4, 200)) == "kind"
    assert code_of(changed(5, 99)) == "dtype"
    assert code_of(changed(7, 1)) == code_of(changed(63, 1)) == "header"  # reserved
    assert code_of(changed(4, Kind.HELLO)) == "dtype"  # it has no tensor
    assert code_of(changed(5, Dtype.NONE)) == "dtype"
    assert code_of(changed(5, Dtype.F32)) == "size"
    assert code_of(changed(35, 1)) == "size"  # 2^56 bytes more of tensors
    assert code_of(changed(30, 255)) == "size"  # of JSON
    bye = Header(Kind.BYE, Dtype.NONE, Flags.NONE, 1, 0, 0, 0, 0, 0, 0)
    assert code_of(bye.pack()) == "kind"
    assert code_of(replace(FORWARD, dtype=Dtype.F16).pack()) == "dtype"


@pytest.mark.parametrize("rows, width", [(1025, 64), (10, 65), (10, 32), (1 << 31, 64), (1, 1 << 31)])
def test_giant_shapes_cost_nothing(rows: int, width: int) -> None:
    packed = replace(FORWARD, rows=rows, width=width, tensor_bytes=2 * rows * width).pack()
    tracemalloc.start()
    try:
        assert code_of(packed) == "size"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_pieces_and_json_have_limits_of_their_own() -> None:
    upload = Header(Kind.UPLOAD, Dtype.NONE, Flags.NONE, 1, 0, 0, 1 << 20, 1 << 20, 0, 0)
    Header.read(upload.pack()).check(LIMITS)
    assert code_of(replace(upload, tensor_bytes=(1 << 20) + 1).pack()) == "size"
    assert code_of(changed(35, 1, of=upload)) == "size"
    assert code_of(changed(24, 1, of=upload)) == "size"  # a byte more of JSON
    ping = Header(Kind.PING, Dtype.NONE, Flags.NONE, 0, 0, 0, 0, 0, 0, 0)
    assert code_of(changed(24, 1, of=ping)) == "size"
    assert ping.memory == 0


def test_copies_of_errors_are_whole() -> None:
    error = copy.copy(WireError("size", "Too large."))  # as between processes
    assert (type(error), error.code, str(error), error.retry) == (WireError, "size", "Too large.", False)
