"""The drift of scores and its bound, against derivatives of the softmax."""

from __future__ import annotations

import pytest
import torch

from megatron_mux.moe.drift import larger_reach, layer_drift


def step(scale: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of 200 tokens for 6 experts, before and after a change of that norm for each token."""
    generator = torch.Generator().manual_seed(seed)
    before = 2 * torch.randn(200, 6, generator=generator, dtype=torch.float64)
    change = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    return before, before + scale * change / change.norm(dim=1, keepdim=True)


def test_a_small_change_is_its_first_order_and_within_the_bound() -> None:
    before, after = step(1e-4)
    scores = before.softmax(dim=1)
    jacobian = torch.diag_embed(scores) - scores.unsqueeze(2) * scores.unsqueeze(1)
    first_order = (jacobian @ (after - before).unsqueeze(2)).squeeze(2).abs()
    found = layer_drift(before, after, 2, 1e-4, None)
    assert found.mean == pytest.approx(float(first_order.mean()), rel=1e-3)
    assert found.bound_mean == pytest.approx(float((6e-4 * scores * (1 - scores)).mean()), rel=1e-9)
    assert found.bound_mean is not None and found.violations == 0 and found.mean < found.bound_mean
    assert (found.paper_mean, found.paper_violations) == (None, 0)


def test_what_is_beyond_the_bound_is_counted() -> None:
    before, after = step(1e-2)
    drift = (after.softmax(dim=1) - before.softmax(dim=1)).abs()
    scores = before.softmax(dim=1)
    for reach in (1e-3, 3e-4):
        found = layer_drift(before, after, 2, None, reach)
        assert found.bound_mean is None
        assert found.paper_violations == int((drift > 6 * reach * scores * (1 - scores)).sum()) > 0


def test_choices_that_change_are_counted() -> None:
    before = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    after = torch.tensor([[3.0, 1.0, 2.0, 0.0], [3.0, 2.0, 1.0, 0.0]])
    assert layer_drift(before, after, 2, None, None).changed == pytest.approx(1 / 4)


def test_the_estimate_is_the_largest_ratio_of_any_step() -> None:
    assert larger_reach(None, *step(1e-2), update_norm=0.0) is None
    first = larger_reach(None, *step(1e-2), update_norm=0.5)
    assert larger_reach(first, *step(1e-2), update_norm=1.0) == first == pytest.approx(0.02)
