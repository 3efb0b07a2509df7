"""Matrices dequantised by Triton kernels have the bits of those dequantised by loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from megatron_mux.kernels.dequantise.interface import LAUNCHES
from megatron_mux.kernels.dequantise.triton import TritonDequantise
from megatron_mux.quantised import eight_bit, matrix, nf4
from megatron_mux.quantised.matrix import QuantisedMatrix

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(autouse=True)
def rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates to bf16; GPUs round to nearest even, as torch does."""
    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        found = torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()
        return found.reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def _random(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size[0]))


def _nf4(double: bool, rounded_to: torch.dtype | None = None) -> QuantisedMatrix:
    """Rows and columns of two fused matrices, whose scales share scales across rows."""
    parts = [nf4.quantise([_random(rows, 384)], double).cut(range(64, 384)) for rows in (96, 40)]
    held = nf4.Nf4Matrix.joined(parts).take(torch.tensor([7, 100, *range(30), 135, 90]))
    held.rounded_to = rounded_to
    return held


def _eight_bit(to: eight_bit.Format, rows: int, columns: int, blocks: int) -> QuantisedMatrix:
    """All codes occur: also e4m3's subnormal numbers and, twice, its NaN."""
    codes = torch.arange(rows * columns).to(torch.uint8).view(rows, columns)
    return eight_bit.EightBitMatrix.of(codes, _random(rows, blocks), to)


CASES: dict[str, Callable[[], QuantisedMatrix]] = {
    "nf4": lambda: _nf4(double=False),
    "nf4, double": lambda: _nf4(double=True),
    "nf4, double, rounded to bf16": lambda: _nf4(double=True, rounded_to=torch.bfloat16),
    "nf4 rounded to fp16": lambda: _nf4(double=False, rounded_to=torch.float16),
    "int8 by rows": lambda: _eight_bit("int8", 37, 320, 1),
    "int8 by blocks": lambda: _eight_bit("int8", 12, 384, 3),
    "int8 of an odd width": lambda: _eight_bit("int8", 19, 45, 1),
    "fp8 by rows": lambda: _eight_bit("fp8", 37, 320, 1),
    "fp8 by blocks": lambda: _eight_bit("fp8", 12, 384, 3),
    "fp8 by blocks of 12": lambda: _eight_bit("fp8", 8, 36, 3),
}


def _by_kernel(held: QuantisedMatrix, place: Tensor, counts: Tensor | None = None) -> Tensor:
    """What kernels make of a copy of `place`."""
    found = place.to(DEVICE, copy=True)
    own = None if counts is None else counts.to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "kernels_for", lambda _: TritonDequantise)
        held.on(DEVICE).dequantise_into(found, own)
    return found.cpu()


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors are equal, NaN being equal to itself."""
    return torch.equal(found.nan_to_num(nan=12345), wanted.nan_to_num(nan=12345))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_loops(case: str, dtype: torch.dtype) -> None:
    held = CASES[case]()
    wanted = held.values(dtype)
    assert wanted.isnan().any() == case.startswith("fp8")
    assert _same(_by_kernel(held, torch.empty_like(wanted)), wanted)


@pytest.mark.parametrize("case", [name for name in CASES if "odd" not in name])
def test_experts_without_rows_are_left_as_they_are(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_mux.kernels.dequantise.triton.GROUPS", 32
    )  # several programs for each expert
    held = CASES[case]().take(torch.arange(8))
    counts = torch.tensor([0, 3, 0, 1])
    place = torch.full((8, held.columns), 7.0)
    wanted, found = place.clone(), place.clone()
    for rows in (slice(2, 4), slice(6, 8)):
        wanted[rows] = held.values(torch.float32)[rows]
    held.dequantise_into(found, counts)
    assert _same(found, wanted), "of loops"
    assert _same(_by_kernel(held, place, counts), wanted)


@pytest.mark.parametrize("case", ["nf4, double", "int8 by blocks"])
def test_launches_are_those_declared(case: str, launches: list[str]) -> None:
    held = CASES[case]()
    _by_kernel(held, torch.empty(held.rows, held.columns))
    assert len(launches) == LAUNCHES[case.partition(",")[0] if "nf4" in case else "eight_bit"]
