"""Triton's bottlenecks and factors against the formulas.

`test_triton_interpreted.py` runs them in Triton's interpreter, `tests/gpu/test_triton_rows_on_gpu.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.dropout import key_of
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.grouped_rows import LAUNCHES, RowTables, adapt_rows
from megatron_mux.kernels.low_rank.terms import ACTIVATIONS, BiasedActivation, Term
from megatron_mux.kernels.low_rank.triton import TritonKernels
from tests.unit.kernels.interpreted.low_rank import DEVICE, INTERLEAVED, REST, UNALIGNED, groups_of

N = 144
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def bottleneck(slot: int, rank: int, activation: str, n: int = N, dtype: torch.dtype = torch.float32) -> Term:
    """A bottleneck with random weights that depend on its slot and rank alone."""
    generator = torch.Generator().manual_seed(key_of(slot, rank) % (1 << 60))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    biases = random(rank).to(dtype), random(n).to(dtype)
    inner = BiasedActivation(activation, *biases, random(rank), random(n))
    down, up = (random(rank, n) / n**0.5).to(dtype), (random(n, rank) / rank**0.5).to(dtype)
    scale = 0.5 + 0.25 * (slot % 5)
    return Term(slot, down, up, scale, None, random(rank, n), random(n, rank), activation=inner)


def factors(slot: int, columns: Sequence[int] | None = None, n: int = N) -> Term:
    """Random factors that depend on their slot and number alone."""
    count = n if columns is None else len(columns)
    generator = torch.Generator().manual_seed(key_of(slot, count) % (1 << 60))
    values, gradient = torch.randn(2, count, generator=generator).to(DEVICE)
    place = None if columns is None else torch.tensor(columns, dtype=torch.int32, device=DEVICE)
    return Term.of_factors(slot, values, gradient, place)


def trained(term: Term) -> dict[str, tuple[Tensor, Tensor]]:
    """Each trained tensor of a term, with its gradient."""
    a = term.activation
    if a is None:
        found = {"factors": (term.up_factors, term.up_factors_gradient)}
    else:
        found = {
            "down": (term.down, term.down_gradient),
            "up": (term.up, term.up_gradient),
            "down bias": (a.down_bias, a.down_bias_gradient),
            "up bias": (a.up_bias, a.up_bias_gradient),
        }
    return {name: (v, g) for name, (v, g) in found.items() if v is not None and g is not None}


def with_own_gradients(term: Term) -> Term:
    if term.activation is None:
        assert term.up_factors_gradient is not None
        return replace(term, up_factors_gradient=term.up_factors_gradient.clone())
    assert term.down_gradient is not None and term.up_gradient is not None
    own = replace(
        term.activation,
        down_bias_gradient=term.activation.down_bias_gradient.clone(),
        up_bias_gradient=term.activation.up_bias_gradient.clone(),
    )
    down, up = term.down_gradient.clone(), term.up_gradient.clone()
    return replace(term, activation=own, down_gradient=down, up_gradient=up)


def results(y: Tensor, dout: Tensor, terms: Sequence[Term], groups: RowGroups) -> dict[str, Tensor]:
    """Everything that the kernels make of copies of the terms."""
    terms = [with_own_gradients(term) for term in terms]
    y = y.clone().requires_grad_()
    anchor = torch.zeros((), device=DEVICE, requires_grad=True)
    out = adapt_rows(y, anchor, RowTables.of(terms), groups, TritonKernels)
    out.backward(dout)
    assert y.grad is not None
    found = {f"{t.slot} {i} {name}": g for i, t in enumerate(terms) for name, (_, g) in trained(t).items()}
    return {"out": out.detach(), "dy": y.grad, **found}


def expected(y: Tensor, dout: Tensor, terms: Sequence[Term], groups: RowGroups) -> dict[str, Tensor]:
    """The same by the formulas, through autograd in fp64."""
    out, dy = y.double(), dout.double()
    leaves, found = {}, {}
    for i, term in enumerate(terms):
        for name, (value, gradient) in trained(term).items():
            leaves[i, name] = value.double().requires_grad_()
            found[f"{term.slot} {i} {name}"] = (leaves[i, name], gradient.double())
    for slot, (start, stop) in zip(groups.slots, groups.rows, strict=True):
        own = y[start:stop].double().requires_grad_()
        made = own.clone()
        for i, term in enumerate(terms):
            if term.slot == slot and term.activation is not None:
                inner = F.linear(own, leaves[i, "down"], leaves[i, "down bias"])
                hidden = FUNCTIONS[term.activation.name](inner)
                made = made + term.scale * F.linear(hidden, leaves[i, "up"], leaves[i, "up bias"])
            elif term.slot == slot:
                columns = torch.arange(y.shape[1]) if term.columns is None else term.columns.long().cpu()
                ones = torch.ones(y.shape[1], dtype=torch.float64, device=DEVICE)
                made = made * ones.index_copy(0, columns.to(DEVICE), leaves[i, "factors"])
        made.backward(dout[start:stop].double())
        assert own.grad is not None
        out[start:stop], dy[start:stop] = made.detach(), own.grad
    sums = {name: g if leaf.grad is None else g + leaf.grad for name, (leaf, g) in found.items()}
    return {"out": out, "dy": dy, **sums}


def inputs(rows: int, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y, dout = (torch.randn(rows, n, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return y, dout


def check(terms: Sequence[Term], groups: RowGroups, tolerance: float = 2e-6, n: int = N) -> None:
    """Results equal the formulas up to `tolerance` in relative norm, each tensor by itself."""
    dtype = next((term.down.dtype for term in terms if term.activation is not None), torch.float32)
    y, dout = inputs(len(groups.sequence_ids), n, dtype)
    found, wanted = results(y, dout, terms, groups), expected(y, dout, terms, groups)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].double() - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize(("activation", "rank"), zip(ACTIVATIONS, (1, 13, 33, 64), strict=True))
def test_bottlenecks(activation: str, rank: int) -> None:
    check([bottleneck(0, rank, activation)], groups_of([0], [(2, 70)]))


@pytest.mark.parametrize("columns", [None, INTERLEAVED, UNALIGNED, [17]])
def test_factors(columns: Sequence[int] | None) -> None:
    check([factors(0, columns)], groups_of([0], [(2, 70)]))


def test_ragged_groups() -> None:
    terms = [
        bottleneck(2, 8, "gelu"),
        factors(0, INTERLEAVED),
        factors(0, [c for c in range(N) if c not in INTERLEAVED]),
        bottleneck(1, 40, "tanh"),
        factors(4, UNALIGNED),
        factors(4, REST[::2]),
        bottleneck(6, 8, "relu"),
        bottleneck(7, 24, "silu"),
    ]
    # Slots 3 and 9 have no term here, slot 6 has no row; groups are empty, of one row, of more than a tile.
    rows = [(0, 67), (67, 67), (67, 72), (75, 76), (76, 80), (80, 210), (210, 211)]
    check(terms, groups_of([2, 0, 3, 1, 9, 4, 7], rows))


def test_rows_without_terms_are_copies() -> None:
    y, dout = inputs(20)
    y[:5], dout[:5], y[13:] = float("nan"), float("inf"), float("nan")
    found = results(y, dout, [factors(1)], groups_of([0, 1, 2], [(0, 5), (5, 10), (10, 17)]))
    for rows in (slice(0, 5), slice(10, 20)):
        assert torch.equal(found["out"][rows].nan_to_num(7.0), y[rows].nan_to_num(7.0))
        assert torch.equal(found["dy"][rows], dout[rows])
    assert all(torch.isfinite(found[name][5:10]).all() for name in ("out", "dy"))


def test_many_tasks() -> None:
    sizes = [(i * 7) % 23 for i in range(33)]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    terms = [
        bottleneck(i, 1 + i % 16, ACTIVATIONS[i // 2 % 4], 48) if i % 2 else factors(i, n=48)
        for i in range(33)
    ]
    check(terms, groups_of(range(33), rows), n=48)


def test_half_precision() -> None:
    terms = [bottleneck(0, 8, "gelu", dtype=torch.float16), factors(1, INTERLEAVED)]
    check(terms, groups_of([0, 1], [(0, 40), (40, 49)]), 1e-3)


def test_neighbours_leave_no_trace() -> None:
    """A group's results have the same bits alone, elsewhere among others, and beside NaN."""
    own = [bottleneck(1, 13, "gelu"), factors(3, INTERLEAVED), factors(3, [8, 11])]
    others = [bottleneck(0, 100, "relu"), factors(2), bottleneck(4, 5, "tanh")]
    y, dout = inputs(100)
    alone = results(y[:70], dout[:70], own, groups_of([1, 3], [(0, 30), (30, 67)]))
    among_y, among_dout = (torch.full((193, N), float("nan"), device=DEVICE) for _ in range(2))
    places = ((slice(0, 30), slice(90, 120)), (slice(30, 67), slice(125, 162)))
    for here, there in places:
        among_y[there], among_dout[there] = y[here], dout[here]
    for term in others:
        for value, _ in trained(term).values():
            value.fill_(float("nan"))
    groups = groups_of([0, 1, 2, 3, 4], [(0, 90), (90, 120), (120, 125), (125, 162), (162, 190)])
    among = results(among_y, among_dout, [others[0], *own, *others[1:]], groups)
    for here, there in places:
        assert all(torch.equal(among[name][there], alone[name][here]) for name in ("out", "dy"))
    for i, term in enumerate(own):
        for name in trained(term):
            assert torch.equal(among[f"{term.slot} {i + 1} {name}"], alone[f"{term.slot} {i} {name}"])
    # A value that is not finite shows, whatever the activation.
    assert not torch.isfinite(among["out"][:90]).any() and not torch.isfinite(among["out"][162:]).any()


def test_launches_are_as_declared(launches: list[str]) -> None:
    tables = RowTables.of(
        [factors(0, INTERLEAVED), factors(0, [8, 9]), bottleneck(1, 70, "gelu"), bottleneck(2, 4, "relu")]
    )
    groups = groups_of([0, 1, 2], [(0, 66), (66, 67), (67, 70)])
    y, dout = inputs(70)
    latent = torch.zeros(70, tables.bottlenecks.width(groups), device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "activated": lambda: TritonKernels.activated(latent, tables.bottlenecks, groups),
        "activation_gradient_": lambda: TritonKernels.activation_gradient_(
            latent.clone(), latent, tables.bottlenecks, groups
        ),
        "scale_": lambda: TritonKernels.scale_(y, tables.factors, groups),
        "factor_gradients": lambda: TritonKernels.factor_gradients(y, dout, tables.factors, groups),
    }
    assert calls.keys() == LAUNCHES.keys()
    for name, call in calls.items():
        launches.clear()
        call()
        assert len(launches) == LAUNCHES[name], name
