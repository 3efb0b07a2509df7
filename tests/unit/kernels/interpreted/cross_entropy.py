"""Triton's cross entropy against torch.

`test_triton_interpreted.py` runs it in Triton's interpreter, `tests/gpu/test_triton_on_gpu.py` on a GPU.
"""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from torch import Tensor

from megatron_mux.kernels.loss import triton as triton_cross_entropy
from megatron_mux.kernels.loss.cross_entropy import Vocabulary, gradient_, statistics

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
assert (DEVICE.type == "cpu") == triton.knobs.runtime.interpret

ROWS, VOCAB, WIDTH = 7, 300, 304
"""Columns beyond VOCAB are padding."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for blocks in (triton_cross_entropy.STATISTICS, triton_cross_entropy.GRADIENT):
        monkeypatch.setitem(blocks, "BLOCK", 128)  # several of a row


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with padding that must not count, labels, and shares that are smoothed."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(ROWS, WIDTH, generator=generator) * 5).to(DEVICE, dtype)
    logits[:, VOCAB:] = 1e4
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator).to(DEVICE)
    smoothing = torch.where(torch.arange(ROWS) % 2 == 0, 0.1, 0.0).to(DEVICE)
    return logits, labels, smoothing


@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_agrees_with_torch(dtype: torch.dtype, tolerance: float, smoothed: bool) -> None:
    logits, labels, shares = example(dtype)
    smoothing = shares if smoothed else torch.zeros_like(shares)
    wide = logits[:, :VOCAB].double().requires_grad_(True)
    rows = zip(wide, labels, smoothing.tolist(), strict=True)
    wanted = torch.stack([F.cross_entropy(row, label, label_smoothing=share) for row, label, share in rows])
    wanted.sum().backward()
    given, vocabulary = shares if smoothed else None, Vocabulary(VOCAB, VOCAB, None)
    found = statistics(logits, labels, vocabulary, given)
    gradient = gradient_(logits, labels, found, vocabulary, given)
    assert torch.allclose(found.nll.double(), wanted, rtol=1e-5)
    assert gradient.data_ptr() == logits.data_ptr() and not gradient[:, VOCAB:].any()
    assert wide.grad is not None
    assert (gradient[:, :VOCAB].double() - wide.grad).norm() <= tolerance * wide.grad.norm()


def test_a_rank_without_the_label_or_without_tokens() -> None:
    logits, labels, _ = example(torch.float32)
    before = logits.clone()
    elsewhere = torch.full_like(labels, -1)
    found = statistics(logits, elsewhere, Vocabulary(VOCAB, 2 * VOCAB, None))
    assert torch.allclose(found.nll, torch.logsumexp(before[:, :VOCAB], dim=1))
    softmax = gradient_(logits, elsewhere, found, Vocabulary(VOCAB, 2 * VOCAB, None))[:, :VOCAB]
    assert torch.allclose(softmax, before[:, :VOCAB].softmax(dim=1), atol=1e-6)
    nothing = statistics(before, elsewhere, Vocabulary(0, VOCAB, None))
    assert torch.equal(nothing.total, torch.zeros_like(nothing.total))


def test_a_vocabulary_divided_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take turns: each round, a collective gets what the other rank gave it in the round before."""
    logits, labels, shares = example(torch.float32)
    whole = logits[:, :VOCAB].contiguous()
    parts = [whole[:, :100].contiguous(), whole[:, 100:].contiguous()]
    columns = [labels.where(labels < 100, -1), (labels - 100).where(labels >= 100, -1)]
    given: dict[tuple[int, int], Tensor] = {}
    turn = [0, 0]  # rank, collective

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        rank, number = turn
        given[rank, number] = tensor.clone()
        other = given.get((1 - rank, number), tensor)
        tensor.copy_(torch.maximum(tensor, other) if op == dist.ReduceOp.MAX else tensor + other)
        turn[1] += 1

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    group = cast(dist.ProcessGroup, object())
    for _ in range(3):
        found = []
        for rank in range(2):
            turn[:] = [rank, 0]
            vocabulary = Vocabulary(parts[rank].shape[1], VOCAB, group)
            found.append(statistics(parts[rank], columns[rank], vocabulary, shares))
    alone = Vocabulary(VOCAB, VOCAB, None)
    wanted = statistics(whole, labels, alone, shares)
    for rank in range(2):
        assert torch.allclose(found[rank].nll, wanted.nll, rtol=1e-6)
        gradient_(
            parts[rank], columns[rank], found[rank], Vocabulary(parts[rank].shape[1], VOCAB, group), shares
        )
    gradient = gradient_(whole, labels, wanted, alone, shares)
    assert torch.allclose(torch.cat(parts, dim=1), gradient, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_leaves_the_others(value: float) -> None:
    logits, labels, _ = example(torch.float32)
    clean, vocabulary = logits.clone(), Vocabulary(VOCAB, VOCAB, None)
    wanted = statistics(clean, labels, vocabulary)
    wanted_gradient = gradient_(clean, labels, wanted, vocabulary)
    logits[3] = value
    found = statistics(logits, labels, vocabulary)
    gradient = gradient_(logits, labels, found, vocabulary)
    others = [i for i in range(ROWS) if i != 3]
    assert not torch.isfinite(found.nll[3])
    assert torch.equal(found.nll[others], wanted.nll[others])
    assert torch.equal(gradient[others], wanted_gradient[others])
