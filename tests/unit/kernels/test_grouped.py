"""Both implementations of grouped products against each other and the definition; no group sees another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_mux.kernels.grouped import LoopProducts, Products, StackedProducts, choose

ROWS = ((2, 9), (9, 21), (30, 31), (31, 64))  # a gap, adjoining groups, one row
RANKS = (8, 3, 16, 1)
SCALES = (1.0, 0.5, 2.0, 0.25)
K, N, T = 24, 40, 70


def operands(dtype: torch.dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator, dtype=torch.float64).to(dtype)
    downs = [torch.randn(r, K, generator=generator, dtype=torch.float64).to(dtype) for r in RANKS]
    ups = [torch.randn(N, r, generator=generator, dtype=torch.float64).to(dtype) for r in RANKS]
    return x, downs, ups


@pytest.mark.parametrize(
    ("products", "dtype", "tolerance"),
    [
        (LoopProducts, torch.float64, 1e-12),
        (LoopProducts, torch.float32, 1e-4),
        (StackedProducts, torch.float32, 1e-4),
        (StackedProducts, torch.bfloat16, 0.3),
    ],
)
def test_products_are_what_they_say(products: type[Products], dtype: torch.dtype, tolerance: float) -> None:
    x, downs, ups = operands(dtype)
    h = products.project(x, ROWS, downs)
    y = torch.ones(T, N, dtype=dtype)
    products.expand_(y, ROWS, h, ups, SCALES)
    outer = products.outer(h, x, ROWS, RANKS, SCALES)
    wanted = torch.ones(T, N, dtype=torch.float64)
    at = 0
    groups = zip(ROWS, downs, ups, RANKS, SCALES, outer, strict=True)
    for (start, stop), down, up, rank, scale, found in groups:
        own = x[start:stop].double() @ down.double().t()
        torch.testing.assert_close(h[at : at + stop - start, :rank].double(), own, rtol=0.02, atol=tolerance)
        wanted[start:stop] += scale * own @ up.double().t()
        torch.testing.assert_close(
            found.double(), scale * own.t() @ x[start:stop].double(), rtol=0.02, atol=tolerance * 10
        )
        at += stop - start
    torch.testing.assert_close(y.double(), wanted, rtol=0.03, atol=tolerance * 10)
    assert (y[:2] == 1).all() and (y[21:30] == 1).all() and (y[64:] == 1).all()


@pytest.mark.parametrize("products", [LoopProducts, StackedProducts])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_stays_in_its_group(products: type[Products], poison: float) -> None:
    def everything() -> list[Tensor]:
        h = products.project(x, ROWS, downs)
        y = torch.ones(T, N)
        products.expand_(y, ROWS, h, ups, SCALES)
        outer = products.outer(h, x, ROWS, RANKS, SCALES)
        return [y[:9], y[21:], outer[0], outer[2], outer[3]]

    x, downs, ups = operands(torch.float32)
    wanted = everything()
    x[9:21], downs[1], ups[1] = poison, torch.full_like(downs[1], poison), torch.full_like(ups[1], poison)
    for found, before in zip(everything(), wanted, strict=True):
        assert torch.equal(found, before)


def test_cpu_takes_the_loop() -> None:
    assert choose(torch.zeros(64, 8), ROWS) is LoopProducts
