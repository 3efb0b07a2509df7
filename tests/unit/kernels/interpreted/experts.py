"""Triton's kernels of routed experts against loops: products, LoRAs of all tasks and experts, and their gradients.

`test_triton_interpreted.py` runs them in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import triton
from torch import Tensor

from megatron_mux.kernels.experts import product as grouped_product
from megatron_mux.kernels.experts.groups import SLOTS, ExpertGroups
from megatron_mux.kernels.experts.interface import LAUNCHES, PRODUCT_ROWS, ExpertKernels
from megatron_mux.kernels.experts.reference import LoopExpertKernels
from megatron_mux.kernels.experts.terms import ExpertTable, ExpertTerm
from megatron_mux.kernels.experts.triton import TritonExpertKernels, product_

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert (DEVICE.type == "cpu") == triton.knobs.runtime.interpret

K, N = 152, 144  # more than a block of each kernel
# Rows of each expert and slot: experts without rows, tasks without, more than a tile.
SIZES = ([3, 0, 40], [0, 0, 0], [5, 2, 1])
AT = (3, 0, 4)  # of five experts


class Made(NamedTuple):
    """What kernels make of rows."""

    y: Tensor
    dx: Tensor
    down_gradients: list[Tensor]
    up_gradients: list[Tensor]


def groups_of(sizes: Sequence[Sequence[int]]) -> ExpertGroups:
    keys = [
        place * SLOTS + slot
        for place, own in enumerate(sizes)
        for slot, n in enumerate(own)
        for _ in range(n)
    ]
    return ExpertGroups(torch.tensor(keys, dtype=torch.int32, device=DEVICE), len(sizes))


def term_of(slot: int, rank: int, dtype: torch.dtype = torch.float32) -> ExpertTerm:
    """Random weights that depend on the slot alone."""
    generator = torch.Generator().manual_seed(slot)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    return ExpertTerm(
        slot,
        rank,
        random(5 * rank, K).div_(K**0.5).to(dtype),
        random(N, 5 * rank).div_(rank**0.5).to(dtype),
        random(5 * rank, K),
        random(N, 5 * rank),
        0.5 + slot,
        AT,
    )


TERMS = [term_of(0, 3), term_of(2, 40)]  # slot 1 has no adapter here


def rows_of(width: int, keys: Tensor) -> Tensor:
    """Rows that depend on their expert, their task and their place among the two's alone."""
    made = []
    for key, count in zip(*torch.unique_consecutive(keys, return_counts=True), strict=True):
        generator = torch.Generator().manual_seed(int(key) + width)
        made.append(torch.randn(int(count), width, generator=generator))
    return torch.cat(made).to(DEVICE)


def made_by(
    kernels: type[ExpertKernels], x: Tensor, dy: Tensor, terms: Sequence[ExpertTerm], groups: ExpertGroups
) -> Made:
    """Everything that kernels make, with gradients that begin as the terms' do."""
    own = [
        replace(t, down_gradient=t.down_gradient.clone(), up_gradient=t.up_gradient.clone()) for t in terms
    ]
    table = ExpertTable(own, groups.held, DEVICE)
    y, dx = torch.ones_like(dy), torch.ones_like(x)
    latent = kernels.down(x, table, groups)
    kernels.up_(y, latent, table, groups)
    d_latent = kernels.latent_gradient(dy, table, groups)
    kernels.weight_gradients(x, latent, dy, d_latent, table, groups)
    kernels.input_gradient_(dx, d_latent, table, groups)
    return Made(y, dx, [t.down_gradient for t in own], [t.up_gradient for t in own])


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 2e-6 * wanted.norm()


def test_loras_are_those_of_loops() -> None:
    groups = groups_of(SIZES)
    x, dy = rows_of(K, groups.keys), rows_of(N, groups.keys)
    found, wanted = (made_by(k, x, dy, TERMS, groups) for k in (TritonExpertKernels, LoopExpertKernels))
    assert_near(found.y, wanted.y)
    assert_near(found.dx, wanted.dx)
    for of_found, of_wanted in zip(found[2:], wanted[2:], strict=True):
        for own, other in zip(of_found, of_wanted, strict=True):
            assert_near(own, other)
    without = (groups.keys % SLOTS) == 1
    assert (found.y[without] == 1).all() and (found.dx[without] == 1).all(), "rows without an adapter stay"


def test_neighbours_leave_no_trace() -> None:
    """A task's results have the same bits alone and among others, whose values are not numbers."""
    groups = groups_of(SIZES)
    x, dy = rows_of(K, groups.keys), rows_of(N, groups.keys)
    mine = groups.keys % SLOTS == 2
    x[~mine], dy[~mine] = float("nan"), float("inf")
    among = made_by(TritonExpertKernels, x, dy, TERMS, groups)
    only = groups_of([[0, 0, own[2]] for own in SIZES])
    alone = made_by(TritonExpertKernels, x[mine], dy[mine], TERMS[1:2], only)
    assert torch.equal(among.y[mine], alone.y) and torch.equal(among.dx[mine], alone.dx)
    assert torch.equal(among.down_gradients[1], alone.down_gradients[0])
    assert torch.equal(among.up_gradients[1], alone.up_gradients[0])


@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_those_of_loops(transposed: bool) -> None:
    groups = groups_of([[0], [130], [0], [1], [3]])
    x, weight = (
        rows_of(K, groups.keys),
        torch.randn(5, N, K, generator=torch.Generator().manual_seed(1)).to(DEVICE),
    )
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    x[groups.keys == SLOTS * 3] = float("nan")
    found = torch.full((len(x), N), 7.0, device=DEVICE)
    product_(found, x, weight, groups.tiles(PRODUCT_ROWS))
    wanted = grouped_product._by_loop(x, weight, groups)
    assert found[130].isnan().all()
    clean = groups.keys != SLOTS * 3
    assert_near(found[clean], wanted[clean])


@pytest.mark.parametrize(("held", "tasks"), [(1, 1), (3, 2)])
def test_launches_do_not_grow(launches: list[str], held: int, tasks: int) -> None:
    """However many experts and tasks there are, an operation is as many launches as it declares."""
    groups = groups_of(SIZES[:held])
    x, dy = rows_of(K, groups.keys), rows_of(N, groups.keys)
    terms = [replace(term, at=AT[:held]) for term in TERMS[:tasks]]
    made_by(TritonExpertKernels, x, dy, terms, groups)
    assert len(launches) == sum(LAUNCHES.values())
