"""The frozen product with low-rank terms of many tasks, against plain autograd: values, gradients, what it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.dropout import keep_mask
from megatron_mux.kernels.groups import RowGroups, tiles_of
from megatron_mux.kernels.low_rank.product import low_rank_linear
from megatron_mux.kernels.low_rank.reference import LoopKernels
from megatron_mux.kernels.low_rank.terms import Term, TermTable

T, K, N = 17, 6, 10
ROWS = ((2, 4), (4, 9), (9, 12), (13, 16), (16, 16))
SLOTS = (3, 0, 5, 2, 1)
SCATTERED, RUNS, REST, SLICE = [1, 2, 5, 9], [0, 1, 4, 5, 8, 9], [2, 3, 6, 7], [6, 7, 8]


def groups(training: bool = True) -> RowGroups:
    steps = tuple(range(len(SLOTS)))
    table = [[slot, *rows, step] for slot, rows, step in zip(SLOTS, ROWS, steps, strict=True)]
    own, tiles = (torch.tensor(x, dtype=torch.int32) for x in (table, list(tiles_of(ROWS))))
    ids, index = torch.arange(T, dtype=torch.int32) % 3, torch.arange(T, dtype=torch.int32)
    return RowGroups(SLOTS, ROWS, steps, training, own, tiles, ids, index)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def term(slot: int, rank: int, columns: list[int] | None, scale: float = 2.0, **more: Any) -> Term:
    """A term that trains its matrices; with `factors` it trains these instead."""
    place = None if columns is None else torch.tensor(columns, dtype=torch.int32)
    down, up = random(rank, K), random(N if columns is None else len(columns), rank)
    if more.pop("factors", False):
        d, b = random(rank), random(up.shape[0])
        more |= {"down_factors": d, "up_factors": b}
        more |= {"down_factors_gradient": torch.zeros_like(d), "up_factors_gradient": torch.zeros_like(b)}
    else:
        more |= {"down_gradient": torch.zeros_like(down), "up_gradient": torch.zeros_like(up)}
    return Term(slot, down, up, scale, place, **more)


def neighbours(*terms: Term) -> list[Term]:
    """The same terms, with their A, and the gradients of A, next to each other in memory."""
    sizes = [t.rank for t in terms]
    downs = torch.cat([t.down for t in terms]).split(sizes)
    gradients = torch.zeros(sum(sizes), K, dtype=torch.float64).split(sizes)
    changed = zip(terms, downs, gradients, strict=True)
    return [replace(t, down=down, down_gradient=gradient) for t, down, gradient in changed]


def make_terms() -> list[Term]:
    """Of five slots: no term, a wide one, several next to each other, with dropout, with factors. Slot 5 has none."""
    torch.manual_seed(0)
    return [
        term(3, 9, None, 0.5),
        *neighbours(term(0, 3, SCATTERED), term(0, 2, SLICE), term(0, 3, [])),
        term(2, 4, RUNS, dropout=0.4, key=77, first_feature=3),
        term(2, 4, REST, 7.0, dropout=0.4, key=78),
        term(2, 3, RUNS, factors=True),
        term(1, 3, SLICE),
    ]


def trained(terms: Sequence[Term]) -> list[tuple[Tensor, Tensor]]:
    """Each trained tensor and where its gradient goes."""
    pairs = [
        (getattr(t, name), getattr(t, f"{name}_gradient"))
        for t in terms
        for name in ("down", "up", "down_factors", "up_factors")
    ]
    return [(value, gradient) for value, gradient in pairs if gradient is not None]


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, terms: Sequence[Term], training: bool = True
) -> Tensor:
    anchor = torch.zeros((), requires_grad=True)
    return low_rank_linear(x, weight, bias, anchor, TermTable(terms), groups(training), LoopKernels)


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, terms: Sequence[Term], training: bool = True
) -> Tensor:
    """The same with plain autograd, task by task and term by term."""
    y = F.linear(x, weight, bias)
    rows_of = groups(training)
    for slot, (start, stop), step in zip(rows_of.slots, rows_of.rows, rows_of.steps, strict=True):
        for t in (t for t in terms if t.slot == slot):
            own = x[start:stop]
            if training and t.dropout:
                places = rows_of.sequence_ids[start:stop], rows_of.token_index[start:stop]
                features = (t.first_feature, t.first_feature + K)
                own = own * keep_mask(t.key, step, *places, features, t.dropout) / (1 - t.dropout)
            latent = F.linear(own, t.down) * (1.0 if t.down_factors is None else t.down_factors)
            delta = F.linear(latent, t.up) * (1.0 if t.up_factors is None else t.up_factors) * t.scale
            columns = torch.arange(N) if t.columns is None else t.columns
            y = torch.cat((y[:start], y[start:stop].index_add(1, columns, delta), y[stop:]))
    return y


@pytest.mark.parametrize(
    ("with_bias", "input_needs_gradient", "training"),
    [(True, True, True), (False, False, True), (True, True, False)],
)
def test_equals_plain_autograd(with_bias: bool, input_needs_gradient: bool, training: bool) -> None:
    terms = make_terms()
    x = random(T, K).requires_grad_(input_needs_gradient)
    weight, bias, dy = random(N, K), random(N) if with_bias else None, random(T, N)
    y = run(x, weight, bias, terms, training)
    y.backward(dy)
    values = [value.requires_grad_() for value, _ in trained(terms)]
    wanted = plain(x, weight, bias, terms, training)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    inputs = [*values, *([x] if input_needs_gradient else [])]
    found = [*(gradient for _, gradient in trained(terms)), *([x.grad] if input_needs_gradient else [])]
    for own, other in zip(
        found, torch.autograd.grad(wanted, inputs, dy, materialize_grads=True), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_gradients_of_micro_batches_add_up() -> None:
    terms, x, weight = make_terms(), random(T, K), random(N, K)
    run(x, weight, None, terms).sum().backward()
    once = [gradient.clone() for _, gradient in trained(terms)]
    run(x, weight, None, terms).sum().backward()
    for (_, gradient), first in zip(trained(terms), once, strict=True):
        torch.testing.assert_close(gradient, 2 * first)


def test_half_precision_gives_fp32_gradients() -> None:
    t = term(3, 2, None)
    places = [torch.zeros_like(x, dtype=torch.float32) for x in (t.down, t.up)]
    half = Term(3, t.down.bfloat16(), t.up.bfloat16(), 1.0, None, places[0], places[1])
    x = random(T, K).bfloat16().requires_grad_()
    run(x, random(N, K).bfloat16(), None, [half]).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert all(place.abs().sum() > 0 for place in places)


def kept_by(function: Callable[[], Tensor]) -> list[Tensor]:
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        function()
    return kept


def test_keeps_the_input_once_and_no_mask() -> None:
    x, weight, terms = random(T, K).requires_grad_(), random(N, K), make_terms()
    kept = kept_by(lambda: run(x, weight, None, terms))
    assert [tuple(tensor.shape) for tensor in kept] == [(N, K), (T, K), (T, 16)]
    assert kept[0] is weight and kept[1].data_ptr() == x.data_ptr()
