"""Tensors survive the wire exactly, or to half a step of int8; bad values and bad indices are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from megatron_mux.split.protocol.pieces import Piece, PieceEntry
from megatron_mux.split.protocol.tensors import decode, decode_pieces, encode, encode_pieces
from megatron_mux.split.protocol.wire import Dtype, Limits, WireError

EXACT = {
    Dtype.F32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.F16: torch.float16,
    Dtype.F64: torch.float64,
}
OPEN = Limits(finite=False)


def received(tensor: Tensor, dtype: Dtype, limits: Limits = OPEN) -> Tensor:
    content = np.frombuffer(bytearray(encode(tensor, dtype)), np.uint8)
    assert len(content) == tensor.shape[0] * dtype.row_bytes(tensor.shape[1])
    return decode(content, tensor.shape[0], tensor.shape[1], dtype, limits)


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 33),
    dtype=st.sampled_from(list(EXACT)),
    seed=st.integers(0, 99),
)
def test_values_survive(rows: int, width: int, dtype: Dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, width, dtype=torch.float64, generator=generator)
    found = received(tensor, dtype)
    assert found.dtype == EXACT[dtype] and torch.equal(found, tensor.to(EXACT[dtype]))
    turned = received(tensor.T, dtype)
    assert torch.equal(turned, tensor.T.to(EXACT[dtype]))


@given(
    rows=st.integers(1, 9), width=st.integers(1, 33), exponent=st.integers(-44, 36), seed=st.integers(0, 99)
)
def test_int8_keeps_each_row_to_half_a_step(rows: int, width: int, exponent: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(rows, width, generator=generator) * 10.0**exponent
    tensor[0] = 0.0
    found = received(tensor, Dtype.I8)
    step = tensor.abs().amax(dim=1, keepdim=True) / 127
    # Of subnormal scales, few bits are left.
    assert (found - tensor).abs().le(0.502 * step + 127 * 1.5e-45).all()
    assert torch.equal(found[0], torch.zeros(width))


def test_tensors_that_need_no_conversion_are_not_copied() -> None:
    tensor = torch.zeros(3, 4)
    view = encode(tensor, Dtype.F32)
    tensor.fill_(1.0)
    assert np.frombuffer(view, np.float32).sum() == 12
    content = np.zeros(48, np.uint8)
    assert decode(content, 3, 4, Dtype.F32, OPEN).data_ptr() == content.ctypes.data


@pytest.mark.parametrize("dtype", [*EXACT, Dtype.I8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite(dtype: Dtype, value: float) -> None:
    tensor = torch.ones(5, 8)
    tensor[3, 2] = value
    with pytest.raises(WireError) as refused:
        received(tensor, dtype, Limits())
    assert refused.value.code == "finite"
    found = received(tensor, dtype)
    assert not found[3].isfinite().all() and found[[0, 1, 2, 4]].eq(1).all()


def test_hostile_scales_of_int8_are_found() -> None:
    content = np.full(12, 255, np.uint8)  # a NaN for a scale
    with pytest.raises(WireError):
        decode(content, 1, 8, Dtype.I8, Limits())


def test_the_largest_norm_of_a_row() -> None:
    tensor = torch.ones(3, 4)
    tensor[1] = 2.0
    assert torch.equal(received(tensor, Dtype.F32, Limits(norm=4.0)), tensor)
    with pytest.raises(WireError) as refused:
        received(tensor, Dtype.F32, Limits(norm=3.99))
    assert refused.value.code == "norm"
    tensor[2, 0] = float("nan")
    with pytest.raises(WireError):
        received(tensor, Dtype.F32, Limits(norm=4.0, finite=False))


def sent(pieces: list[Piece]) -> np.ndarray:
    return np.frombuffer(bytearray(b"".join(encode_pieces(pieces))), np.uint8)


def entry(**changes: Any) -> PieceEntry:
    right = {"key": "a", "kind": "value", "dtype": "f32", "shape": (2,)}
    return PieceEntry.model_validate({**right, **changes})


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*EXACT.values(), torch.bool]),
            st.lists(st.integers(0, 4), max_size=3),
            st.integers(0, 9),
        ),
        max_size=4,
    )
)
def test_pieces_survive(shapes: list[tuple[torch.dtype, list[int], int]]) -> None:
    pieces = []
    for dtype, shape, seed in shapes:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).gt(0).to(dtype)
        pieces.append(Piece("a", "value", tuple(shape), values))
    found = decode_pieces(list(map(PieceEntry.of, pieces)), sent(pieces), Limits())
    for one, other in zip(found, pieces, strict=True):
        assert one.tensor.dtype == other.tensor.dtype and torch.equal(one.tensor, other.tensor)


@pytest.mark.parametrize(
    "index",
    [[], [{"shape": (3,)}], [{"shape": (1,)}], [{}, {}], [{"dtype": None}], [{"dtype": "f64"}],
     [{"shape": (2**31 - 1,) * 4}], [{"shape": (0, 2**31 - 1, 2**31 - 1)}], [{"dim": 0, "runs": ((0, 1),)}]],
    ids=str,
)  # fmt: skip
def test_indices_that_do_not_describe_the_bytes(index: list[dict[str, Any]]) -> None:
    with pytest.raises(WireError) as refused:
        decode_pieces([entry(**changes) for changes in index], np.zeros(8, np.uint8), Limits())
    assert refused.value.code == "index"


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "i64"}, {"shape": (2.0,)}, {"shape": (True, 2)}, {"shape": (-1, -2)}, {"shape": (1,) * 5},
     {"shape": (2**31,)}, {"kind": "moment"}, {"key": "x" * 513}, {"runs": (0, 1)}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_entries_that_are_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        entry(**changes)


def test_pieces_that_are_not_finite() -> None:
    pieces = [Piece("weight", "value", (2,), torch.tensor([1.0, float("nan")]))]
    index = list(map(PieceEntry.of, pieces))
    with pytest.raises(WireError, match="weight"):
        decode_pieces(index, sent(pieces), Limits())
    assert decode_pieces(index, sent(pieces), OPEN)[0].tensor[1].isnan()


def test_any_byte_is_a_bool() -> None:
    (mask,) = decode_pieces([entry(dtype="bool", shape=(3,))], np.array([0, 2, 255], np.uint8), Limits())
    assert mask.tensor.view(torch.uint8).tolist() == [0, 1, 1]
