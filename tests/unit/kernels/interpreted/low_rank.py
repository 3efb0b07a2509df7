"""Triton's low-rank kernels against the formulas.

`test_triton_interpreted.py` runs them in Triton's interpreter, `tests/gpu/test_triton_on_gpu.py` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from megatron_mux.kernels import groups as row_groups
from megatron_mux.kernels.dropout import keep_mask, key_of
from megatron_mux.kernels.groups import RowGroups, Rows, tiles_of
from megatron_mux.kernels.low_rank import triton as triton_low_rank
from megatron_mux.kernels.low_rank.product import LAUNCHES
from megatron_mux.kernels.low_rank.terms import Term, TermTable
from megatron_mux.kernels.low_rank.triton import TritonKernels, alignment_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert (DEVICE.type == "cpu") == triton.knobs.runtime.interpret

K, N = 152, 144  # more than a block of each kernel


def groups_of(slots: Sequence[int], rows: Sequence[Rows], training: bool = True) -> RowGroups:
    """Groups whose sequences of 7 tokens have ids by slot, so that they do not depend on where the rows lie."""
    steps = tuple(5 + slot for slot in slots)
    sequence_ids = torch.zeros(rows[-1][1] + 3, dtype=torch.int32)
    token_index = torch.zeros_like(sequence_ids)
    for slot, (start, stop) in zip(slots, rows, strict=True):
        place = torch.arange(stop - start, dtype=torch.int32)
        sequence_ids[start:stop] = 100 * slot + place // 7
        token_index[start:stop] = place % 7
    table = [(slot, *own, step) for slot, own, step in zip(slots, rows, steps, strict=True)]
    tiles = torch.tensor(list(tiles_of(rows)), dtype=torch.int32).view(-1, 3)
    tensors = (torch.tensor(table, dtype=torch.int32), tiles, sequence_ids, token_index)
    return RowGroups(tuple(slots), tuple(rows), steps, training, *(t.to(DEVICE) for t in tensors))


def term_of(
    slot: int, rank: int, columns: Sequence[int] | None = None, *, k: int = K, n: int = N, factors: bool = False,
    dropout: float = 0.0, dtype: torch.dtype = torch.float32, module: str = "q",
) -> Term:  # fmt: skip
    """A term with random weights that depend on its slot, module and rank alone."""
    generator = torch.Generator().manual_seed(key_of(slot, module, rank) % (1 << 60))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    count = n if columns is None else len(columns)
    term = Term(
        slot=slot,
        down=(random(rank, k) / k**0.5).to(dtype),
        up=(random(count, rank) / rank**0.5).to(dtype),
        scale=0.5 + 0.25 * (slot % 5),
        columns=None if columns is None else torch.tensor(columns, dtype=torch.int32, device=DEVICE),
        dropout=dropout,
        key=key_of(slot, module),
        first_feature=3 * slot,
    )
    if not factors:
        return replace(term, down_gradient=random(rank, k), up_gradient=random(count, rank))
    return replace(
        term,
        down_factors=random(rank),
        up_factors=random(count),
        down_factors_gradient=random(rank),
        up_factors_gradient=random(count),
    )


def results(x: Tensor, dy: Tensor, terms: Sequence[Term], groups: RowGroups) -> dict[str, Tensor]:
    """Everything that the kernels make of copies of the terms."""
    terms = [with_own_gradients(term) for term in terms]
    table = TermTable(terms)
    y, dx = torch.ones_like(dy), torch.ones_like(x)
    latent = TritonKernels.down(x, table, groups)
    TritonKernels.up_(y, latent, table, groups)
    d_latent = TritonKernels.latent_gradient(dy, table, groups)
    TritonKernels.input_gradient_(dx, d_latent, table, groups)
    TritonKernels.weight_gradients(x, latent, dy, d_latent, table, groups)
    return {"y": y, "dx": dx, **gradients_of(terms)}


GRADIENTS = ("down_gradient", "up_gradient", "down_factors_gradient", "up_factors_gradient")


def with_own_gradients(term: Term) -> Term:
    own = {name: getattr(term, name) for name in GRADIENTS}
    copies: dict[str, Any] = {name: None if g is None else g.clone() for name, g in own.items()}
    return replace(term, **copies)


def gradients_of(terms: Sequence[Term]) -> dict[str, Tensor]:
    return {
        f"{term.slot} {i} {name}": getattr(term, name)
        for i, term in enumerate(terms)
        for name in GRADIENTS
        if getattr(term, name) is not None
    }


def expected(x: Tensor, dy: Tensor, terms: Sequence[Term], groups: RowGroups) -> dict[str, Tensor]:
    """The same by the formulas, through autograd in fp64."""
    y, dx = torch.ones_like(dy, dtype=torch.float64), torch.ones_like(x, dtype=torch.float64)
    terms = [with_own_gradients(term) for term in terms]
    found = {name: g.double() for name, g in gradients_of(terms).items()}
    for slot, (start, stop), step in zip(groups.slots, groups.rows, groups.steps, strict=True):
        for i, term in enumerate(terms):
            if term.slot != slot:
                continue
            own = x[start:stop].double().requires_grad_()
            named = {"down": term.down, "up": term.up, "d": term.down_factors, "b": term.up_factors}
            leaves = {n: t.double().requires_grad_() for n, t in named.items() if t is not None}
            dropped = own
            if groups.training and term.dropout:
                places = groups.sequence_ids[start:stop], groups.token_index[start:stop]
                features = (term.first_feature, term.first_feature + x.shape[1])
                kept = keep_mask(term.key, step, *places, features, term.dropout)
                dropped = own * kept / (1 - term.dropout)
            out = (dropped @ leaves["down"].t() * leaves.get("d", 1)) @ leaves["up"].t()
            out = out * term.scale * leaves.get("b", 1)
            columns = slice(None) if term.columns is None else term.columns.long()
            y[start:stop, columns] += out.detach()
            out.backward(dy[start:stop, columns].double())
            assert own.grad is not None
            dx[start:stop] += own.grad
            kinds = (
                {"d": "down_factors", "b": "up_factors"} if "d" in leaves else {"down": "down", "up": "up"}
            )
            for leaf, name in kinds.items():
                if getattr(term, f"{name}_gradient") is None:
                    continue
                gradient = leaves[leaf].grad
                assert gradient is not None
                found[f"{slot} {i} {name}_gradient"] += gradient
    return {"y": y, "dx": dx, **found}


def fixed(term: Term) -> Term:
    """A term that is not trained and goes away, such as PiSSA and OLoRA have for each trained one."""
    return replace(term, scale=-term.scale, down_gradient=None, up_gradient=None)


def inputs(rows: int, k: int = K, n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, k, generator=generator).to(DEVICE, dtype),
        torch.randn(rows, n, generator=generator).to(DEVICE, dtype),
    )


def check(terms: Sequence[Term], groups: RowGroups, tolerance: float = 2e-6, k: int = K, n: int = N) -> None:
    """Results equal the formulas up to `tolerance` in relative norm, each tensor by itself."""
    x, dy = inputs(len(groups.sequence_ids), k, n, terms[0].down.dtype)
    found, wanted = results(x, dy, terms, groups), expected(x, dy, terms, groups)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].double() - value).norm() <= tolerance * value.norm(), name


INTERLEAVED = [c for c in range(N) if c // 8 % 3 == 0]
"""Columns of q, k or v of a fused product: runs of the head size."""
REST_OF_THEM = [c for c in range(N) if c // 8 % 3 != 0]
UNALIGNED = [c for c in range(N) if c % 11 < 5]
REST = [c for c in range(N) if c % 11 >= 5]


@pytest.mark.parametrize("rank", [1, 4, 13, 33, 128])
def test_ranks(rank: int) -> None:
    check([term_of(0, rank)], groups_of([0], [(2, 70)]))


def test_ragged_groups_with_several_terms() -> None:
    terms = [
        term_of(0, 8, INTERLEAVED, module="q"),
        term_of(0, 3, [c for c in range(N) if c not in INTERLEAVED], module="v"),
        term_of(1, 16),
        term_of(2, 5, UNALIGNED, module="gate", dropout=0.3),
        term_of(2, 40, REST, module="up", dropout=0.1),
        term_of(4, 8, [17]),
        term_of(6, 8),
    ]
    # Slots 3 and 9 have no term here, slot 6 has no row; groups are empty, of one row, of more than a tile.
    groups = groups_of([2, 0, 3, 1, 9, 4], [(0, 67), (67, 67), (67, 72), (75, 76), (76, 80), (80, 210)])
    check(terms, groups)


def test_terms_on_the_same_columns() -> None:
    """As of PiSSA on q and v: the subtracted terms come behind the trained ones."""
    trained = [term_of(0, 8, INTERLEAVED, module="q", dropout=0.1), term_of(0, 40, REST_OF_THEM, module="v")]
    subtracted = [
        fixed(term_of(0, 8, INTERLEAVED, module="q0")),
        fixed(term_of(0, 40, REST_OF_THEM, module="v0")),
    ]
    both_trained = [term_of(1, 5), term_of(1, 3, module="k"), term_of(1, 1, module="o")]
    terms = [*trained, *subtracted, *both_trained]
    check(terms, groups_of([1, 0], [(0, 20), (20, 100)]))


@pytest.mark.parametrize("columns", [range(4, 20), range(9, 1, -1), None])
def test_partial_overlaps_are_refused(columns: Sequence[int] | None) -> None:
    terms = [term_of(0, 8, list(range(2, 10))), term_of(0, 8, columns and list(columns), module="k")]
    with pytest.raises(ValueError, match="slot 0 overlap in some"):
        TermTable(terms)
    with pytest.raises(ValueError, match="factors of slot 0 share"):
        TermTable([Term.of_factors(0, torch.ones(4), torch.ones(4), None)] * 2)


@pytest.mark.parametrize(("training", "aligned"), [(True, True), (True, False), (False, True)])
def test_dropout(training: bool, aligned: bool) -> None:
    slots = [0, 4, 2 if aligned else 1]  # the first feature of slot 1 is odd
    terms = [term_of(slots[0], 8, dropout=0.5), term_of(slots[1], 8), term_of(slots[2], 16, dropout=0.05)]
    assert bool(TermTable(terms).alignment) == aligned
    check(terms, groups_of(slots, [(0, 30), (30, 65), (65, 80)], training))


@pytest.mark.parametrize(
    ("term", "alignment"),
    [
        (term_of(0, 24), 8),
        (term_of(0, 12), 4),
        (term_of(0, 3), 1),
        (term_of(0, 8, list(range(8, 16)) + list(range(32, 40))), 8),
        (term_of(0, 8, list(range(4, 20))), 0),
        (term_of(0, 8, list(range(12))), 0),
        (term_of(0, 8, [1, 0, 2, 3, 4, 5, 6, 7]), 0),
        (replace(term_of(0, 8), up=torch.zeros(8 * N + 1, device=DEVICE)[1:].view(N, 8)), 0),
    ],
)
def test_alignment(term: Term, alignment: int) -> None:
    assert TermTable([term]).alignment == alignment
    assert TermTable([term, term_of(2, 10)]).alignment == min(alignment, 2)


@pytest.mark.parametrize(("first", "width"), [(0, N + 3), (1, N + 8)])
def test_rows_at_any_address(first: int, width: int) -> None:
    table, groups = TermTable([term_of(0, 8, INTERLEAVED)]), groups_of([0], [(0, 70)])
    x, dy = inputs(len(groups.sequence_ids))
    apart = dy.new_zeros(len(dy), width)[:, first : first + N].copy_(dy)
    assert alignment_of(table, dy) == 8 and alignment_of(table, apart) == 0
    latent = TritonKernels.down(x, table, groups)
    for values in (wanted := dy.clone(), apart):
        TritonKernels.up_(values, latent, table, groups)
    torch.testing.assert_close(apart, wanted)
    found = (TritonKernels.latent_gradient(values, table, groups)[:70, :8] for values in (wanted, apart))
    torch.testing.assert_close(*found)


def test_factors() -> None:
    terms = [
        term_of(0, 70, INTERLEAVED, factors=True, module="q"),
        term_of(0, 20, [c for c in range(N) if c not in INTERLEAVED], factors=True, module="v", dropout=0.2),
        term_of(1, 8),
    ]
    check(terms, groups_of([0, 1], [(0, 70), (70, 90)]), 4e-6)


def test_many_tasks() -> None:
    sizes = [(i * 7) % 23 for i in range(20)]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    terms = [term_of(i, 1 + i % 16, k=40, n=48, dropout=0.1 * (i % 2)) for i in range(20)]
    check(terms, groups_of(range(20), rows), k=40, n=48)


def test_half_precision() -> None:
    terms = [
        term_of(0, 8, INTERLEAVED, dtype=torch.float16, dropout=0.1),
        term_of(1, 24, dtype=torch.float16),
    ]
    check(terms, groups_of([0, 1], [(0, 40), (40, 49)]), 1e-3)


def test_neighbours_leave_no_trace() -> None:
    """A group's results have the same bits alone, elsewhere among others, and beside NaN."""
    check_neighbours(
        [term_of(1, 8, INTERLEAVED, module="q", dropout=0.2), term_of(1, 13, [8, 11], module="v")],
        [term_of(0, 100, dropout=0.5), term_of(2, 5, factors=True)],
    )


def test_neighbours_that_are_not_aligned_leave_no_trace() -> None:
    own = [
        term_of(2, 16, INTERLEAVED, module="q", dropout=0.2),
        fixed(term_of(2, 16, INTERLEAVED, module="0")),
    ]
    assert TermTable(own).alignment == 8
    check_neighbours(own, [term_of(0, 3, dropout=0.5), term_of(3, 8, UNALIGNED)])


def test_factors_beside_neighbours_that_are_not_aligned() -> None:
    own = [term_of(2, 24, INTERLEAVED, factors=True)]
    check_neighbours(own, [term_of(0, 3, dropout=0.5), term_of(4, 8, UNALIGNED)])


def in_parts_of(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (row_groups, triton_low_rank):
        monkeypatch.setattr(module, "PART_ROWS", rows)


def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks with rows for two, one (its rest apart) and three parts; the last one trains factors and is not divided."""
    in_parts_of(32, monkeypatch)
    terms = [
        term_of(0, 8, INTERLEAVED, dropout=0.1),
        term_of(0, 70, REST_OF_THEM, module="k"),
        term_of(1, 13),
        term_of(2, 4, factors=True),
    ]
    check(terms, groups_of([0, 1, 2], [(5, 75), (75, 130), (130, 230)]))


def test_neighbours_of_rows_in_parts_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    in_parts_of(32, monkeypatch)
    check_neighbours([term_of(1, 8, dropout=0.2)], [term_of(0, 13, dropout=0.5), term_of(2, 5)])


def check_neighbours(own: Sequence[Term], others: Sequence[Term]) -> None:
    """Results of one task's terms have the same bits alone and between two tasks whose weights and rows are NaN."""
    slots = [others[0].slot, own[0].slot, others[1].slot]
    x, dy = inputs(100)
    alone = results(x[:70], dy[:70], own, groups_of(slots[1:2], [(0, 70)]))
    among_x, among_dy = (torch.full((173, width), float("nan"), device=DEVICE) for width in (K, N))
    among_x[90:160], among_dy[90:160] = x[:70], dy[:70]
    for term in others:
        term.down.fill_(float("nan"))
        term.up.fill_(float("nan"))
    groups = groups_of(slots, [(0, 90), (90, 160), (160, 170)])
    among = results(among_x, among_dy, [others[0], *own, others[1]], groups)
    assert torch.equal(among["y"][90:160], alone["y"]) and torch.equal(among["dx"][90:160], alone["dx"])
    assert not torch.isfinite(among["y"][:90]).any() and (among["y"][170:] == 1).all()
    for i, term in enumerate(own):
        for name in gradients_of([term]):
            name = name.split(" 0 ")[1]
            assert torch.equal(among[f"{slots[1]} {i + 1} {name}"], alone[f"{slots[1]} {i} {name}"]), name


def test_launches_are_as_declared(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terms = [term_of(0, 8, INTERLEAVED), term_of(0, 4, [8, 9], module="k"), term_of(1, 70, factors=True)]
    table, groups = TermTable(terms), groups_of([0, 1], [(0, 66), (66, 67)])
    x, dy = inputs(67)
    latent = torch.zeros(67, table.width(groups), device=DEVICE)
    calls: dict[str, Callable[[], object]] = {
        "down": lambda: TritonKernels.down(x, table, groups),
        "up_": lambda: TritonKernels.up_(dy, latent, table, groups),
        "latent_gradient": lambda: TritonKernels.latent_gradient(dy, table, groups),
        "input_gradient_": lambda: TritonKernels.input_gradient_(x, latent, table, groups),
        "weight_gradients": lambda: TritonKernels.weight_gradients(x, latent, dy, latent, table, groups),
    }
    assert calls.keys() | {"add_parts_"} == LAUNCHES.keys()
    for name, call in calls.items():
        launches.clear()
        call()
        assert len(launches) == LAUNCHES[name], name
    in_parts_of(32, monkeypatch)
    groups = groups_of([0, 1], [(0, 66), (66, 67)])
    launches.clear()
    calls["weight_gradients"]()
    assert len(launches) == LAUNCHES["weight_gradients"] + LAUNCHES["add_parts_"]
