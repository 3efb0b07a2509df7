"""NF4 has the codes, the scales and the values of bitsandbytes, bit for bit, however a matrix is cut and fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.errors import UserError
from megatron_mux.quantised import matrix, nf4


def _weights(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    found = 0.05 * torch.randn(rows, columns, generator=generator)
    found[1] = 0  # a block of zeros
    return found.to(dtype)


def _theirs(weights: Tensor, double: bool) -> tuple[Tensor, Any, Tensor]:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(weights, compress_statistics=double, quant_type="nf4")
    return codes, state, functional.dequantize_4bit(codes, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("size", [(2, 64), (100, 192), (300, 1024)])
def test_values_are_those_of_bitsandbytes(
    size: tuple[int, int], double: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "VALUES_AT_ONCE", 4096)  # in several pieces
    weights = _weights(*size, dtype)
    codes, state, wanted = _theirs(weights, double)
    held = nf4.quantise(weights.split(7), double)
    assert torch.equal(held.rowwise["codes"].flatten(), codes.flatten())
    assert torch.equal(held.rowwise["absmax"].flatten(), state.absmax)
    assert torch.equal(held.values(dtype), wanted)


@pytest.mark.parametrize("double", [True, False])
def test_rows_and_columns_keep_their_values(double: bool) -> None:
    one, other = (nf4.quantise([_weights(rows, 320)], double) for rows in (96, 40))
    rows = torch.tensor([3, 100, 2, 95, 135, 0])
    wanted = torch.cat((one.values(torch.float32), other.values(torch.float32)))[rows, 64:256]
    fused = nf4.Nf4Matrix.joined([part.cut(range(64, 256)) for part in (one, other)]).take(rows)
    assert torch.equal(fused.values(torch.float32), wanted)


def test_values_are_rounded_to_the_dtype_that_was_quantised() -> None:
    weights = _weights(8, 128, torch.bfloat16)
    codes, state, wanted = _theirs(weights, double=True)
    held = nf4.Nf4Matrix.of(
        codes.view(8, -1), state.absmax.view(8, -1), state.state2.absmax, state.offset, torch.bfloat16
    )
    assert torch.equal(held.values(torch.float32), wanted.float())


def test_a_cut_within_a_block_is_refused() -> None:
    with pytest.raises(UserError, match=r"96 of 320 input features .* multiples of 64"):
        nf4.quantise([_weights(4, 320)]).cut(range(96))


@pytest.mark.parametrize("make", [nf4.quantise, lambda chunks: nf4.quantise(chunks, double=False)])
def test_an_empty_matrix_takes_as_much(make: Callable[[list[Tensor]], nf4.Nf4Matrix]) -> None:
    from megatron_mux.quantised.scheme import Quantisation

    held = make([_weights(300, 1024)])
    how = Quantisation("nf4", double="first" in held.rowwise)
    sizes = 300, 1024, [(300, 1024)]
    assert how.empty(*sizes).nbytes == how.nbytes(*sizes) == held.nbytes
