"""Draws are distributed as `transformers` would have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from megatron_mux.engine.generation.sampling import Draws, Sampling, choose

COUNT = 10_000


def wanted(scores: Tensor, sampling: Sampling) -> Tensor:
    """`[V]` probabilities of the tokens, by the processors of `transformers`."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    ids: Any = torch.zeros(1, 1, dtype=torch.int64)
    given: Any = scores[None].float()
    found: Tensor = chain(ids, given)
    return found.softmax(-1)[0].double()


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.6, top_k=12),
    Sampling(temperature=1.3, top_p=0.8, top_k=20),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_draws_are_distributed_as_transformers_has_them(sampling: Sampling) -> None:
    scores = torch.randn(50, generator=torch.Generator().manual_seed(2)) * 2
    uniform = torch.rand(COUNT, generator=torch.Generator().manual_seed(3), dtype=torch.float64).tolist()
    draws = Draws.of([sampling] * COUNT, uniform, 0, torch.device("cpu"))
    chosen = choose(scores.expand(COUNT, -1), draws)[:, 0].long()
    probs = wanted(scores, sampling)
    found = torch.bincount(chosen, minlength=50)
    assert not found[probs == 0].any(), "what top-k and top-p leave out is never drawn"
    often = probs * COUNT >= 5  # the test's approximation wants so many of each
    rest = ~often & (probs > 0)
    observed, expected = found[often].tolist(), (probs[often] * COUNT).tolist()
    if rest.any():
        observed.append(int(found[rest].sum()))
        expected.append(float(probs[rest].sum()) * COUNT)
    p_value = stats.chisquare(observed, expected, sum_check=False).pvalue
    assert p_value > 0.001 / len(SAMPLINGS)


def test_the_largest_number_and_a_tiny_temperature_draw_a_token_that_may_be_drawn() -> None:
    scores = torch.tensor([[0.0, 5.0, 1.0, float("-inf")]] * 3)
    draws = Draws.of(
        [Sampling(1.0, 0.5), Sampling(1.0), Sampling(1e-9)], [0.999999999999] * 3, 2, torch.device("cpu")
    )
    found = choose(scores, draws)
    assert found[:, 0].tolist() == [1, 0, 1], "the likeliest, the least likely of three, the likeliest"
    torch.testing.assert_close(found[:, 2:4], torch.tensor([[1.0, 2.0]] * 3, dtype=torch.float64))
    torch.testing.assert_close(found[1, 1], scores[1].double().log_softmax(0)[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told_and_leave_the_others(value: float) -> None:
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    scores[:, 8] = float("-inf")  # padding
    spoilt = scores.clone()
    spoilt[1, 3] = value
    draws = Draws.of(
        [Sampling(), Sampling(1.0), Sampling(0.9, 0.8, 4), Sampling()], [0.4] * 4, 1, torch.device("cpu")
    )
    found, wanted = choose(spoilt, draws), choose(scores, draws)
    assert found[1, 0] == -1 and not (wanted[:, 0] < 0).any()
    assert torch.equal(found[[0, 2, 3]], wanted[[0, 2, 3]])
