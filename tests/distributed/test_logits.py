"""Families divided over ranks against transformers: logits, losses, predictions and gradients of packed segments.

Each model once at 2 x 2, each family with sequence parallelism, and three unlike ones at the other splits: where
features lie does not depend on anything else (`tests/unit/backbone/test_columns.py` holds that for all of them).
Undivided models are in `tests/unit/backbone/test_logits_alone.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import FAMILIES
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.runtime import Parallel
from tests import memory_probe, tiny_models
from tests.logits import all_logits

pytestmark = pytest.mark.versions

TOLERANCE = 5e-4
LENGTHS = (7, 12, 12, 3, 21)

UNLIKE = ("llama-one-kv-head", "gpt2", "qwen2")
CASES = [
    *((name, (2, 2, True)) for name in FAMILIES),
    *(
        (name, (2, 2, False))
        for name in tiny_models.NAMES
        if name not in (*FAMILIES, *tiny_models.WITH_EXPERTS)
    ),
    *((name, (2, 2, False)) for name in UNLIKE[1:]),
    *((name, (1, 2, False)) for name in UNLIKE[:2]),
    *((name, (2, 1, False)) for name in UNLIKE[::2]),
    *((name, (4, 1, False)) for name in UNLIKE[1:]),
    *((name, (1, 4, False)) for name in UNLIKE[:1]),
]

Joined = Callable[..., Parallel]


@pytest.fixture(scope="session")
def checkpoints(once: Any) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        sharded = name == "llama"
        directory: Path = once(name, lambda path: tiny_models.make(path, name, sharded=sharded))
        return directory / (name + "-sharded" * sharded)

    return made


def sequences(vocab: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab, (length,), generator=generator) for length in LENGTHS]


def batch_of(backbone: Backbone, parallel: Parallel) -> PackedBatch:
    found = sequences(backbone.shape.vocab)
    count = sum(LENGTHS) - len(LENGTHS)
    return pack(
        [
            PackedSequence(
                "first" if i < 2 else "second",
                i,
                tokens,
                torch.ones(len(tokens), dtype=torch.bool),
                1 / count,
            )
            for i, tokens in enumerate(found)
        ],
        ("first", "second"),
        {"first": 0, "second": 0},
        multiple=parallel.tp_size if parallel.sequence_parallel else 1,
    ).to()


@cache
def reference(path: Path) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' logits `[T, V]`, mean loss, and its gradient for the embeddings `[T, H]`; one sequence a call."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    count = sum(LENGTHS) - len(LENGTHS)
    logits, gradients, losses = [], [], []
    for sequence in sequences(model.config.vocab_size):
        tokens = sequence.unsqueeze(0)
        embedded = model.get_input_embeddings()(tokens).detach().requires_grad_(True)
        found = model(inputs_embeds=embedded).logits[0]
        loss = F.cross_entropy(found[:-1], tokens[0, 1:], reduction="sum") / count
        loss.backward()
        logits.append(found.detach())
        losses.append(loss.detach())
        gradients.append(embedded.grad[0])
    return torch.cat(logits), torch.stack(losses).sum(), torch.cat(gradients)


@pytest.mark.parametrize(
    ("name", "split"), CASES, ids=lambda x: x if isinstance(x, str) else f"{x[0]}x{x[1]}{'-sp' * x[2]}"
)
def test_family_agrees_with_transformers(
    name: str, split: tuple[int, int, bool], joined: Joined, checkpoints: Callable[[str], Path], stages: Any
) -> None:
    path = checkpoints(name)
    parallel = joined(*split)
    backbone = Backbone.load(path, parallel)
    batch = batch_of(backbone, parallel)
    logits, loss, gradient = reference(path)
    used = logits.shape[0]

    run = stages(backbone, batch)
    embedded = None
    if parallel.is_first_stage:
        with torch.no_grad():
            embedded = backbone.embed(batch).clone().requires_grad_(True)
    hidden = run.forward(embedded)
    assert hidden.shape == backbone.hidden_shape(batch)
    ours = nll = None
    if parallel.is_last_stage:
        found = all_logits(backbone, batch, hidden)
        assert found.shape == (batch.rows, backbone.shape.vocab)
        assert (found[:used] - logits).abs().max() <= TOLERANCE
        ours, nll = backbone.loss(hidden, batch)
        assert (ours.detach() - loss).abs() <= 1e-5 * loss.abs()
        expected = F.cross_entropy(logits[batch.label_rows], batch.labels, reduction="none")
        assert (nll - expected).abs().max() <= TOLERANCE
        again, tokens = backbone.predict(hidden, batch)
        assert torch.equal(again, nll)
        assert torch.equal(tokens, logits[batch.label_rows].argmax(dim=1))
    back = run.backward(ours)
    if parallel.is_first_stage:
        rows = slice(0, batch.rows)
        if parallel.sequence_parallel:
            size = batch.rows // parallel.tp_size
            rows = slice(parallel.tp_rank * size, (parallel.tp_rank + 1) * size)
        wanted = F.pad(gradient, (0, 0, 0, batch.rows - used))[rows]
        assert back is not None
        assert (back.squeeze(1) - wanted).norm() <= 1e-4 * gradient.norm()


@pytest.mark.parametrize(
    ("name", "dtype", "split"),
    [
        ("gpt2", torch.bfloat16, (1, 2, False)),
        ("llama", torch.float32, (2, 2, False)),
    ],
)
def test_loading_takes_little_more_than_the_shard(
    name: str, dtype: torch.dtype, split: tuple[int, int, bool], joined: Joined, once: Any, checkpoints: Any
) -> None:
    """Peak host memory while loading, against the bytes of the rank's own parameters."""
    sizes: dict[str, dict[str, Any]] = {
        "llama": {"vocab_size": 12000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6},
        "gpt2": {"vocab_size": 12001, "n_embd": 512, "n_layer": 6},
    }
    path = once(f"large-{name}", lambda where: tiny_models.make(where, name, **sizes[name])) / name
    parallel = joined(*split)
    Backbone.load(checkpoints(name), parallel)  # whatever is imported or cached at first use
    with memory_probe.Peak() as peak:
        backbone = Backbone.load(path, parallel, dtype=dtype)
    shard = sum(p.numel() * p.element_size() for p in backbone.model.parameters())
    print(f"peak {peak.grown / shard:.3f} of a shard of {shard / 2**20:.1f} MiB")
    assert shard > 8e6
    assert peak.grown <= 1.2 * shard, (peak.grown, shard)
