"""Experts divided over ranks against transformers: logits, losses and gradients, wherever the experts are."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import read_shape
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.expert_shape import Placement
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape
from tests import tiny_models
from tests.exact_model import exact_model
from tests.logits import all_logits

pytestmark = pytest.mark.versions

Joined = Callable[..., Parallel]
LAYOUTS = [
    # TP, PP, sequence parallel, EP, expert TP
    (1, 1, False, 2, 1),
    (1, 1, False, 4, 1),
    (1, 1, False, 2, 2),
    (1, 2, False, 2, 1),
    (1, 2, False, 1, 2),
    (2, 1, True, 1, 1),
    (2, 1, True, 2, 1),
    (2, 1, True, 1, 2),
    (2, 1, True, 2, 2),
    (2, 2, True, 2, 1),
    (2, 2, True, 1, 1),
]
LATENT = tuple(name for name in tiny_models.WITH_EXPERTS if name.startswith("deepseek"))
NAMES = tuple(name for name in tiny_models.WITH_EXPERTS if name not in LATENT)


def scattered(shape: BackboneShape, size: int) -> Placement:
    """Experts anywhere, unevenly; some on several ranks."""
    assert shape.experts is not None
    drawn = random.Random(3)
    layers: dict[int, tuple[tuple[int, ...], ...]] = {}
    for layer in shape.experts.layers(shape.layers):
        found: list[tuple[int, ...]] = [(drawn.randrange(size),) for _ in range(shape.experts.count)]
        if layer == shape.layers - 1:  # one everywhere, and all others on the last rank
            found = [tuple(range(size)), *[(size - 1,)] * (shape.experts.count - 1)]
        layers[layer] = tuple(found)
    return Placement(size, layers)


def batch_of(shape: BackboneShape, parallel: Parallel, dp_rank: int | None = None) -> PackedBatch:
    """Sequences of a data-parallel rank; the last of several has none."""
    rank = parallel.dp_rank if dp_rank is None else dp_rank
    generator = torch.Generator().manual_seed(rank)
    lengths = () if rank and rank == parallel.dp_size - 1 else (7, 12, 5)
    multiple = parallel.tp_size if parallel.sequence_parallel else 1
    sequences = [
        PackedSequence(
            "first" if i < 2 else "second",
            i,
            torch.randint(3, shape.vocab, (length,), generator=generator),
            torch.ones(length, dtype=torch.bool),
            1 / 32,  # exact in fp32
        )
        for i, length in enumerate(lengths)
    ]
    steps = {"first": 0, "second": 0}
    return pack(sequences, ("first", "second"), steps, multiple=multiple).to()


def reference(path: Path, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Logits `[T, V]` and the gradient of the loss for the embeddings `[T, H]`, both fp64."""
    model = exact_model(path)
    logits, gradients = [], []
    for segment in batch.segments:
        tokens = batch.tokens[segment.start : segment.start + segment.length].unsqueeze(0)
        embedded = model.get_input_embeddings()(tokens).detach().requires_grad_(True)
        found = model(inputs_embeds=embedded).logits[0]
        (F.cross_entropy(found[:-1], tokens[0, 1:], reduction="sum") / 32).backward()
        logits.append(found.detach())
        gradients.append(embedded.grad[0])
    return torch.cat(logits), torch.cat(gradients)


@pytest.mark.parametrize(
    ("names", "placed"), [(NAMES, "contiguous"), (NAMES, "scattered"), (LATENT, "scattered")]
)
@pytest.mark.parametrize("layout_", LAYOUTS, ids=lambda x: "x".join(map(str, map(int, x))))
def test_agrees_with_transformers(
    layout_: Any,
    names: tuple[str, ...],
    placed: str,
    joined: Joined,
    model_of: Callable[[str], Path],
    stages: Any,
) -> None:
    name = names[LAYOUTS.index(layout_) % len(names)]
    path, parallel = model_of(name), joined(*layout_)
    shape = read_shape(path)
    placement = scattered(shape, parallel.experts.size) if placed == "scattered" else None
    recompute: Any = "full" if LAYOUTS.index(layout_) % 2 else "none"
    backbone = Backbone.load(path, parallel, torch.float64, recompute, placement=placement)
    batch = batch_of(shape, parallel)
    run = stages(backbone, batch)
    embedded = backbone.embed(batch).clone().requires_grad_(True) if parallel.is_first_stage else None
    hidden = run.forward(embedded)
    loss = None
    if parallel.is_last_stage:
        loss, _ = backbone.loss(hidden, batch)
        found = all_logits(backbone, batch, hidden)
    back = run.backward(loss)
    if not batch.rows:
        return
    logits, gradient = reference(path, batch)
    used = len(logits)
    if parallel.is_last_stage:
        assert (found[:used] - logits).abs().max() <= 1e-9
    if parallel.is_first_stage:
        wanted = F.pad(gradient, (0, 0, 0, batch.rows - used))
        if parallel.sequence_parallel:
            wanted = wanted.chunk(parallel.tp_size)[parallel.tp_rank]
        assert back is not None
        assert (back.squeeze(1) - wanted).norm() <= 1e-9 * gradient.norm()


def test_no_backward_below_all_adapters(joined: Joined, model_of: Callable[[str], Path]) -> None:
    """Rows that need no gradient send none; where some rank's do, all ranks take part."""
    parallel = joined(1, 1, False, 2, 1)
    backbone = Backbone.load(model_of("mixtral"), parallel)
    batch = batch_of(backbone.shape, parallel)
    with activate(batch):
        assert not backbone.forward(batch).requires_grad
        module: Any = next(op.module for op in backbone.base_ops() if op.layer == 2)
        scale, original = torch.ones(1, requires_grad=True), module.forward
        adapted = parallel.dp_rank == 0
        module.forward = lambda x: (original(x)[0] * scale, None) if adapted else original(x)
        backbone.loss(backbone.forward(batch), batch)[0].backward()
    assert (scale.grad is not None) == adapted
