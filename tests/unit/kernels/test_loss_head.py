"""The chunked loss head against cross entropy on whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.kernels.loss import head as loss_head
from megatron_mux.kernels.loss.head import OutputLayer, predict, weighted_loss
from megatron_mux.kernels.loss.preference import RowScale, scale_gradient

ROWS, HIDDEN, VOCAB, PADDED = 11, 6, 13, 16


@pytest.fixture(autouse=True, params=[1, 40, 10_000])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", {"cpu": request.param})


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, OutputLayer]:
    generator = torch.Generator().manual_seed(0)
    hidden = (
        torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(True)
    )
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    weights = torch.rand(ROWS, generator=generator)
    weight = torch.zeros(PADDED, HIDDEN, dtype=dtype)
    weight[:VOCAB] = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return hidden, labels, weights, OutputLayer(weight, 0, VOCAB, None)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)],
)
def test_agrees_with_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    hidden, labels, weights, layer = example(dtype)
    total, nll = weighted_loss(hidden, labels, weights, layer)
    (total * 3).backward()
    ours = hidden.grad
    wide = hidden.detach().double().requires_grad_(True)
    wanted = F.cross_entropy(wide @ layer.weight[:VOCAB].double().t(), labels, reduction="none")
    (wanted * weights).sum().mul(3).backward()
    assert nll.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not nll.requires_grad
    assert torch.allclose(nll.double(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.allclose(total.double(), (wanted * weights).sum(), atol=tolerance, rtol=tolerance)
    assert ours is not None and wide.grad is not None and ours.dtype == dtype
    assert (ours.double() - wide.grad).norm() <= tolerance * wide.grad.norm()


@pytest.mark.parametrize("labels_of_a_step", [3, 7, 37, 101])
def test_in_bf16_no_weight_or_factor_scales_a_gradient(labels_of_a_step: int) -> None:
    """Against fp64. Single values are rounded to 8 bits; a weight rounded to them is off by 0.13% to 0.2%, for all."""
    generator = torch.Generator().manual_seed(0)
    rows, wide_hidden, vocab, weight = 512, 64, 512, 1 / labels_of_a_step
    hidden = torch.randn(rows, wide_hidden, generator=generator).bfloat16().requires_grad_(True)
    output = torch.randn(vocab, wide_hidden, generator=generator).mul(0.3).bfloat16()
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    layer = OutputLayer(output, 0, vocab, None)
    wide = hidden.detach().double().requires_grad_(True)
    F.cross_entropy(wide @ output.double().t(), labels, reduction="sum").mul(weight).backward()
    assert wide.grad is not None

    def scale() -> float:
        assert hidden.grad is not None and wide.grad is not None
        ours, hidden.grad = hidden.grad.double(), None
        return float((ours * wide.grad).sum() / wide.grad.square().sum()) - 1

    weights = torch.full((rows,), weight)
    weighted_loss(hidden, labels, weights, layer)[0].backward()
    assert abs(scale()) < 4e-4
    (weighted_loss(hidden, labels, torch.ones(rows), layer)[0] * weight).backward()
    assert abs(scale()) < 4e-4
    factors = RowScale()
    total, _ = weighted_loss(scale_gradient(hidden, factors), labels, torch.ones(rows), layer)
    factors.factors = weights.double()
    total.backward()
    assert abs(scale()) < 4e-4


def test_smoothed_labels_are_those_of_transformers_and_other_rows_are_untouched() -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    hidden, labels, weights, layer = example()
    plain_total, plain = weighted_loss(hidden, labels, weights, layer)
    plain_total.backward()
    unsmoothed, hidden.grad = hidden.grad, None
    smoothing = torch.where(torch.arange(ROWS) % 2 == 0, 0.3, 0.0)
    total, losses = weighted_loss(hidden, labels, weights, layer, smoothing)
    total.backward()
    ours = hidden.grad
    assert ours is not None and unsmoothed is not None
    assert torch.equal(losses[1::2], plain[1::2]) and torch.equal(ours[1::2], unsmoothed[1::2])
    rows = hidden.detach()[::2].clone().requires_grad_(True)
    logits = rows @ layer.weight[:VOCAB].t()
    for i, own in enumerate(logits):
        wanted = LabelSmoother(0.3)({"logits": own[None, None]}, labels[::2][i][None, None])
        assert losses[2 * i].item() == pytest.approx(wanted.item(), rel=1e-6)
        (wanted.double() * weights[2 * i]).backward(retain_graph=True)
    assert rows.grad is not None and torch.allclose(ours[::2], rows.grad, rtol=1e-5, atol=1e-7)


def test_padding_of_the_vocabulary_changes_nothing() -> None:
    hidden, labels, weights, layer = example()
    with torch.no_grad():
        layer.weight[VOCAB:] = 100.0
    padded, _ = weighted_loss(hidden, labels, weights, layer)
    bare, _ = weighted_loss(hidden, labels, weights, OutputLayer(layer.weight[:VOCAB], 0, VOCAB, None))
    assert torch.equal(padded, bare)
    assert int(predict(hidden, labels, layer)[1].max()) < VOCAB


def test_a_row_that_is_not_finite_leaves_the_others() -> None:
    clean, labels, weights, layer = example()
    _, wanted = weighted_loss(clean, labels, weights, layer)
    torch.autograd.backward(weighted_loss(clean, labels, weights, layer)[0])
    bad = clean.detach().clone()
    bad[4], bad[7] = float("nan"), float("inf")
    bad.requires_grad_(True)
    total, nll = weighted_loss(bad, labels, weights, layer)
    total.backward()
    kept = [i for i in range(ROWS) if i not in (4, 7)]
    assert bad.grad is not None and clean.grad is not None
    assert torch.equal(nll[kept], wanted[kept])
    assert torch.equal(bad.grad[kept], clean.grad[kept])


def test_predicts() -> None:
    hidden, labels, _, layer = example()
    nll, tokens = predict(hidden, labels, layer)
    logits = hidden @ layer.weight[:VOCAB].t()
    assert torch.equal(tokens, logits.argmax(dim=1))
    assert torch.allclose(nll, F.cross_entropy(logits, labels, reduction="none"))
    assert not nll.requires_grad


def test_no_labels_and_no_gradients_are_fine() -> None:
    hidden, labels, weights, layer = example()
    total, nll = weighted_loss(hidden[:0], labels[:0], weights[:0], layer)
    total.backward()
    assert float(total.detach()) == 0.0 and nll.shape == (0,)
    assert [x.shape[0] for x in predict(hidden[:0], labels[:0], layer)] == [0, 0]
    assert not weighted_loss(hidden.detach(), labels, weights, layer)[0].requires_grad
