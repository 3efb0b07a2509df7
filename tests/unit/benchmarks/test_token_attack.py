"""A server that knows the backbone reads tokens and labels, unless noise drowns them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.token_attack import Front, TokenAttack, recover_labels
from megatron_mux.split.privacy.noise import clip_records

VOCABULARY = 96


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def attack(model: Any) -> TokenAttack:
    return TokenAttack(model, 2, [some_tokens(40, seed) for seed in range(4)], shortlist=24)


def some_tokens(count: int, seed: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))


def noisy(rows: Tensor, noise: float) -> Tensor:
    return rows + noise * torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))


def recovered(attack: TokenAttack, observed: Tensor, noise: float, tokens: Tensor) -> float:
    return float((attack.recover(observed, noise) == tokens).float().mean())


def test_candidates_are_computed_together_as_alone(model: Any) -> None:
    front, tokens = Front(model, 2), some_tokens(6)
    together = front.candidates(tokens[:5], torch.tensor([3, int(tokens[5]), 70]))
    torch.testing.assert_close(together[1], front.hidden(tokens[None])[0, 5])


def test_the_front_is_the_models_and_leaves_it_whole(model: Any) -> None:
    tokens = some_tokens(6)[None]
    states = model.model(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(Front(model, 2).hidden(tokens), states[2])
    assert len(model.model.layers) == 3


def test_all_tokens_are_recovered_without_noise_and_few_with_much(attack: TokenAttack, model: Any) -> None:
    tokens = some_tokens(12)
    rows = Front(model, 2).hidden(tokens[None])[0]
    assert recovered(attack, rows, 0.0, tokens) == 1
    assert recovered(attack, clip_records(rows, [12], float(rows.norm()) / 3), 0.0, tokens) == 1
    scale = float(rows.square().mean().sqrt())
    assert recovered(attack, noisy(rows, 0.3 * scale), 0.3 * scale, tokens) > 0.8
    assert recovered(attack, noisy(rows, 30 * scale), 30 * scale, tokens) < 0.3


def test_labels_are_recovered_without_noise_and_few_with_much(model: Any) -> None:
    hidden = torch.randn(12, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    labels = some_tokens(12)
    loss = torch.nn.functional.cross_entropy(model.lm_head(model.model.norm(hidden)), labels)
    (gradients,) = torch.autograd.grad(loss, hidden)
    hidden, scale = hidden.detach(), float(gradients.square().mean().sqrt())

    def share(noise: float, candidates: Tensor | None = None) -> float:
        found = recover_labels(model, hidden, noisy(gradients, noise), noise, candidates, shortlist=24)
        return float((found == labels).float().mean())

    assert share(0.0) == 1
    assert share(0.0, labels.unique()) == 1
    assert share(30 * scale) < 0.3
