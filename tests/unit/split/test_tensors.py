"""Tensors survive the wire exactly, or to half a step of int8; bad values and bad indices are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mux.split.protocol.tensors import decode, decode_named, encode, encode_named
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


def named(**tensors: Tensor) -> tuple[Any, np.ndarray]:
    index, content = encode_named(tensors)
    return index, np.frombuffer(bytearray(b"".join(content)), np.uint8)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(
            st.sampled_from([*EXACT.values(), torch.bool]),
            st.lists(st.integers(0, 4), max_size=3),
            st.integers(0, 9),
        ),
        max_size=4,
    )
)
def test_named_tensors_survive(shapes: dict[str, tuple[torch.dtype, list[int], int]]) -> None:
    tensors = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).gt(0).to(dtype)
        for name, (dtype, shape, seed) in shapes.items()
    }
    found = decode_named(*named(**tensors), Limits())
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


BAD_INDICES: list[Any] = [
    None,
    {},
    "text",
    [[]],
    ["a"],
    [["a", "f32"]],
    [["a", "f32", [2], 0]],
    [["a", "i64", [1]]],
    [["a", ["f32"], [2]]],
    [["a", "f32", [2.0]]],
    [["a", "f32", [True, 2]]],
    [["a", "f32", [-1, -2]]],
    [["a", "f32", "2"]],
    [["a", "f32", [3]]],
    [["a", "f32", [1]]],
    [["a", "f32", [1] * 9]],
    [["a", "f32", [1 << 39] * 8]],
    [["a", "f32", [1 << 62]]],
    [["a", "f32", [0, 1 << 39, 1 << 39]]],
    [["a", "f32", [1]], ["a", "f32", [1]]],
    [],
]


@pytest.mark.parametrize("index", BAD_INDICES, ids=str)
def test_bad_indices(index: Any) -> None:
    with pytest.raises(WireError) as refused:
        decode_named(index, np.zeros(8, np.uint8), Limits())
    assert refused.value.code == "index"


def test_named_tensors_that_are_not_finite() -> None:
    tensors = {"weight": torch.tensor([1.0, float("nan")])}
    with pytest.raises(WireError, match="weight"):
        decode_named(*named(**tensors), Limits())
    assert decode_named(*named(**tensors), OPEN)["weight"][1].isnan()


def test_any_byte_is_a_bool() -> None:
    found = decode_named([["mask", "bool", [3]]], np.array([0, 2, 255], np.uint8), Limits())
    assert found["mask"].view(torch.uint8).tolist() == [0, 1, 1]
