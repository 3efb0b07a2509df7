"""The fused product against plain autograd: values, gradients, what it keeps, what it skips."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.adapters.adapter import LowRankTerm
from megatron_mux.adapters.low_rank import TaskTerms, low_rank_linear

T, K, N = 17, 6, 10
COLUMNS = torch.tensor([1, 2, 5, 6, 9])


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def parameter(*shape: int) -> Tensor:
    return random(*shape).requires_grad_()


def make_tasks() -> list[TaskTerms]:
    torch.manual_seed(0)
    keep = torch.rand(3, K) > 0.4
    everything = LowRankTerm(parameter(2, K), parameter(N, 2), None, 0.5)
    q = LowRankTerm(parameter(3, K), parameter(5, 3), COLUMNS, 2.0)
    v = LowRankTerm(parameter(3, K), parameter(2, 3), torch.tensor([0, 7]), 2.0)
    nothing = LowRankTerm(parameter(3, K), parameter(0, 3), torch.zeros(0, dtype=torch.int64), 2.0)
    other_scale = LowRankTerm(parameter(1, K), parameter(5, 1), COLUMNS, 7.0)
    dropped = LowRankTerm(parameter(4, K), parameter(5, 4), COLUMNS, 2.0, keep, 1.25)
    dropped_too = LowRankTerm(parameter(4, K), parameter(N, 4), None, 2.0, ~keep, 1.25)
    return [
        ((2, 4), [everything]),
        ((4, 9), [q, v, nothing]),
        ((9, 12), [dropped, dropped_too]),
        ((13, 16), [other_scale, v]),
    ]


def parameters(tasks: list[TaskTerms]) -> list[Tensor]:
    found = {id(p): p for _, terms in tasks for t in terms for p in (t.down, t.up)}
    return list(found.values())


def reference_low_rank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, tasks: Sequence[TaskTerms]
) -> Tensor:
    """`low_rank_linear` with plain autograd, task by task and term by term."""
    y = F.linear(x, weight, bias)
    for (start, stop), terms in tasks:
        for term in terms:
            own = x[start:stop]
            if term.keep is not None:
                own = own * term.keep * term.keep_scale
            delta = F.linear(F.linear(own, term.down.to(x.dtype)), term.up.to(x.dtype)) * term.scale
            columns = torch.arange(y.shape[1], device=y.device) if term.columns is None else term.columns
            piece = y[start:stop].index_add(1, columns, delta)
            y = torch.cat((y[:start], piece, y[stop:]))
    return y


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_equals_plain_autograd(with_bias: bool, input_needs_gradient: bool) -> None:
    tasks = make_tasks()
    x = random(T, K).requires_grad_(input_needs_gradient)
    weight, bias, dy = random(N, K), random(N) if with_bias else None, random(T, N)
    results: list[list[Tensor]] = []
    for function in (low_rank_linear, reference_low_rank_linear):
        y = function(x, weight, bias, tasks)
        wanted = [*parameters(tasks), *([x] if input_needs_gradient else [])]
        results.append([y.detach(), *torch.autograd.grad(y, wanted, dy)])
    for found, reference in zip(*results, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    tasks = make_tasks()
    x, weight = parameter(T, K), random(N, K)

    def function(x: Tensor, *_: Tensor) -> Tensor:
        return low_rank_linear(x, weight, None, tasks)

    assert torch.autograd.gradcheck(function, (x, *parameters(tasks)))


def test_half_precision_backbone_keeps_fp32_parameters() -> None:
    down, up = torch.randn(2, K).requires_grad_(), torch.randn(N, 2).requires_grad_()
    tasks: list[TaskTerms] = [((0, T), [LowRankTerm(down, up, None, 1.0)])]
    x = random(T, K).bfloat16().requires_grad_()
    y = low_rank_linear(x, random(N, K).bfloat16(), None, tasks)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters(tasks))


def test_keeps_the_input_once_and_no_output() -> None:
    tasks = [task for task in make_tasks() if task[1][0].keep is None]
    x, weight = parameter(T, K), random(N, K)
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        low_rank_linear(x, weight, None, tasks)
    storages = [t.data_ptr() for t in kept]
    assert storages.count(x.data_ptr()) == 1 == storages.count(weight.data_ptr())
    assert not any(t.shape == (T, N) for t in kept)


def test_without_terms_only_the_weight_is_kept() -> None:
    kept: list[Any] = []
    x = parameter(T, K)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        low_rank_linear(x, random(N, K), None, [])
    assert len(kept) == 1
