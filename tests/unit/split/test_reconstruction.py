"""The attack is a real one: without noise it recovers nearly all tokens, and labels; with much noise it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.split.reconstruction import Front, TokenAttack, recover_labels
from tests import tiny_models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    path = tiny_models.make(tmp_path_factory.mktemp("model"), "llama")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def texts(model: Any, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(model.config.vocab_size, (12,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("cut", [1, 2])
def test_tokens_are_recovered(model: Any, cut: int) -> None:
    attack, front = TokenAttack(model, cut, texts(model, 8, 0)), Front(model, cut)
    for text in texts(model, 3, 1):
        sent = front.hidden(text[None])[0]
        assert (attack.recover(sent) == text).float().mean() >= 0.95
        assert (attack.recover(0.3 * sent) == text).float().mean() >= 0.95, (
            "clipping scales, and hides nothing"
        )


def test_noise_hides_tokens(model: Any) -> None:
    front, text = Front(model, 1), texts(model, 1, 2)[0]
    sent = front.hidden(text[None])[0]
    scale = 30 * float(sent.std())
    attack = TokenAttack(model, 1, texts(model, 8, 0), scale)
    noisy = sent + scale * torch.randn(sent.shape, generator=torch.Generator().manual_seed(0))
    assert (attack.recover(noisy) == text).float().mean() < 0.5


def test_candidates_have_the_hidden_states_of_whole_texts(model: Any) -> None:
    front, text = Front(model, 2), texts(model, 1, 3)[0]
    states = front.candidates(text[:5], torch.stack([text[5], text[0]]))
    torch.testing.assert_close(states[0], front.hidden(text[None])[0, 5], rtol=1e-4, atol=1e-5)


def test_labels_are_recovered_from_gradients(model: Any) -> None:
    hidden = torch.randn(6, model.config.hidden_size, requires_grad=True)
    labels = torch.arange(6) * 7
    logits = model.lm_head(model.model.norm(hidden))
    torch.nn.functional.cross_entropy(logits, labels).backward()
    assert hidden.grad is not None
    assert torch.equal(recover_labels(model, hidden.detach(), 0.01 * hidden.grad), labels)
