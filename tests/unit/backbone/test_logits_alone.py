"""One process: logits, losses and gradients of packed segments against transformers; exact in fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.registry import FAMILIES
from megatron_mux.batch.pack import PackedSequence, pack
from megatron_mux.batch.packed_batch import PackedBatch, activate
from megatron_mux.runtime import Parallel
from tests import tiny_models
from tests.exact_model import exact_model
from tests.logits import all_logits

pytestmark = pytest.mark.versions

Made = Callable[..., Path]


def batch_of(vocab: int, offset: dict[str, int] | None = None, multiple: int = 1) -> PackedBatch:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(3, vocab, (n,), generator=generator) for n in (7, 12, 12, 20)]
    sequences = [
        PackedSequence("first" if i < 2 else "second", i, t, torch.ones(len(t), dtype=torch.bool), 1 / 64)
        for i, t in enumerate(tokens)
    ]
    return pack(sequences, ("first", "second"), {"first": 0, "second": 0}, offset, multiple).to()


def reference(path: Path, dtype: torch.dtype) -> Any:
    """transformers' model; in fp64 without the detours of its norms and routers over fp32."""
    from transformers import AutoModelForCausalLM

    if dtype == torch.float64:
        return exact_model(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def references(model: Any, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Logits of all segments and the gradient of the mean loss for their embeddings."""
    logits, gradients = [], []
    for segment in batch.segments:
        tokens = batch.tokens[segment.start : segment.start + segment.length].unsqueeze(0)
        embedded = model.get_input_embeddings()(tokens).detach().requires_grad_(True)
        found = model(inputs_embeds=embedded).logits[0]
        (F.cross_entropy(found[:-1], tokens[0, 1:], reduction="sum") / 64).backward()
        logits.append(found.detach())
        gradients.append(embedded.grad[0])
    return torch.cat(logits), torch.cat(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_agrees_with_transformers(
    name: str, dtype: torch.dtype, checkpoints: Made, parallel: Parallel
) -> None:
    path = checkpoints(name)
    backbone = Backbone.load(path, parallel, dtype=dtype)
    batch = batch_of(backbone.shape.vocab)
    logits, gradient = references(reference(path, dtype), batch)
    # GPT-Neo of transformers computes its scores in fp32 always.
    tolerance = 5e-4 if dtype == torch.float32 else 1e-5 if "neo" in name else 1e-9
    with activate(batch):
        embedded = backbone.embed(batch).clone().requires_grad_(True)
        hidden = backbone.forward(batch, embedded)
        loss, nll = backbone.loss(hidden, batch)
        loss.backward()
        assert not backbone.forward(batch).requires_grad
    assert (all_logits(backbone, batch, hidden) - logits).abs().max() <= tolerance
    wanted = F.cross_entropy(logits[batch.label_rows], batch.labels, reduction="none")
    assert (nll - wanted).abs().max() <= max(tolerance, 1e-5)
    assert embedded.grad is not None
    assert (embedded.grad.squeeze(1) - gradient).norm() <= max(tolerance, 1e-6) * gradient.norm()
    with activate(batch):
        again = embedded.detach().requires_grad_(True)
        few = backbone.forward(batch, again, labelled_only=True)
        assert few.shape == (batch.label_rows.shape[0], 1, backbone.shape.hidden)
        backbone.loss(few, batch)[0].backward()
    exact = 1e-5 if dtype == torch.float32 else 1e-12
    assert (few.squeeze(1) - hidden.squeeze(1)[batch.label_rows]).abs().max() <= exact * hidden.abs().max()
    assert again.grad is not None
    assert (again.grad - embedded.grad).norm() <= exact * embedded.grad.norm()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_sharded_files_give_the_same(name: str, checkpoints: Made, parallel: Parallel) -> None:
    whole = Backbone.load(checkpoints(name), parallel)
    sharded = Backbone.load(checkpoints(name, True), parallel)
    assert len(list(checkpoints(name, True).glob("*.safetensors"))) > 1
    for (first, a), (second, b) in zip(
        whole.model.named_parameters(), sharded.model.named_parameters(), strict=True
    ):
        assert first == second and torch.equal(a, b)


def test_everything_is_frozen_and_nothing_is_random(checkpoints: Made, parallel: Parallel) -> None:
    backbone = Backbone.load(checkpoints("qwen3"), parallel)
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not any(p.is_meta for p in [*backbone.model.parameters(), *backbone.model.buffers()])
    batch = batch_of(backbone.shape.vocab)
    with activate(batch):
        assert torch.equal(backbone.forward(batch), backbone.forward(batch))


def test_a_tied_output_layer_takes_no_memory_of_its_own(checkpoints: Made, parallel: Parallel) -> None:
    model = Backbone.load(checkpoints("llama-tied"), parallel).model
    assert model.output_layer.weight is model.embedding.word_embeddings.weight


@pytest.mark.parametrize("name", ["llama", "gpt_neo"])
def test_padding_rows_change_nothing(name: str, checkpoints: Made, parallel: Parallel) -> None:
    backbone = Backbone.load(checkpoints(name), parallel, dtype=torch.float64)
    found = []
    for multiple in (1, 64):
        batch = batch_of(backbone.shape.vocab, multiple=multiple)
        with activate(batch):
            hidden = backbone.forward(batch)
        found.append(backbone.loss(hidden, batch)[1])
        assert hidden.isfinite().all()
    assert batch.rows == 64
    assert torch.allclose(found[0], found[1], atol=1e-12)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("deepseek")])
def test_prefix_agrees_with_a_cache_of_transformers(name: str, checkpoints: Made, parallel: Parallel) -> None:
    from transformers import DynamicCache

    path, count = checkpoints(name), 3
    model = reference(path, torch.float64)
    backbone = Backbone.load(path, parallel, dtype=torch.float64)
    shape = backbone.shape
    batch = batch_of(shape.vocab, {"second": count})
    generator = torch.Generator().manual_seed(2)
    size = (count, shape.kv_heads, shape.head_dim)
    pairs = [
        tuple(torch.randn(size, generator=generator, dtype=torch.float64) for _ in "kv")
        for _ in range(shape.layers)
    ]
    batch.prefix.update({i: {"second": pair} for i, pair in enumerate(pairs)})  # type: ignore[dict-item]
    with activate(batch), torch.no_grad():
        ours = all_logits(backbone, batch)
    for segment in batch.segments:
        rows = slice(segment.start, segment.start + segment.length)
        cache = None
        if segment.task == "second":
            cache = DynamicCache()
            for i, pair in enumerate(pairs):
                key, value = (x.transpose(0, 1).unsqueeze(0) for x in pair)
                cache.update(key, value, i)
        positions = {} if name == "opt" else {"position_ids": batch.positions[rows].unsqueeze(0)}
        mask = torch.ones(1, segment.length + (count if cache is not None else 0), dtype=torch.int64)
        with torch.no_grad():
            wanted = model(
                batch.tokens[rows].unsqueeze(0),
                past_key_values=cache,
                attention_mask=mask,
                use_cache=cache is not None,
                **positions,
            ).logits[0]
        assert (ours[rows] - wanted).abs().max() <= (1e-5 if name == "gpt_neo" else 1e-9)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputing_changes_nothing(recompute: Any, checkpoints: Made, parallel: Parallel) -> None:
    found = []
    for kind in ("none", recompute):
        backbone = Backbone.load(checkpoints("qwen2"), parallel, dtype=torch.float64, recompute=kind)
        batch = batch_of(backbone.shape.vocab)
        with activate(batch):
            embedded = backbone.embed(batch).clone().requires_grad_(True)
            backbone.loss(backbone.forward(batch, embedded), batch)[0].backward()
        found.append(embedded.grad)
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_an_adapter_low_in_the_model_gets_its_gradient(
    recompute: Any, checkpoints: Made, parallel: Parallel
) -> None:
    """The embedding needs no gradient; an operator of the first layer trained by someone must get its own."""
    backbone = Backbone.load(checkpoints("llama"), parallel, recompute=recompute)
    module = backbone.base_ops()[0].module
    scale = torch.ones(1, requires_grad=True)
    original = module.forward
    module.forward = lambda x: (original(x)[0] * scale, None)
    batch = batch_of(backbone.shape.vocab)
    with activate(batch):
        backbone.loss(backbone.forward(batch), batch)[0].backward()
    assert scale.grad is not None and float(scale.grad) != 0


def test_low_precision_stays_close(checkpoints: Made, parallel: Parallel) -> None:
    path = checkpoints("llama")
    wide = Backbone.load(path, parallel)
    narrow = Backbone.load(path, parallel, dtype=torch.bfloat16)
    batch = batch_of(wide.shape.vocab)
    with activate(batch):
        embedded = narrow.embed(batch).clone().requires_grad_(True)
        hidden = narrow.forward(batch, embedded)
        loss, _ = narrow.loss(hidden, batch)
        loss.backward()
        wanted, _ = wide.loss(wide.forward(batch), batch)
    assert hidden.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert embedded.grad is not None and embedded.grad.isfinite().all()
    assert (loss - wanted).abs() <= 0.02 * wanted


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neo", "qwen3"])
def test_a_sequence_that_is_not_finite_reaches_no_other(
    name: str, checkpoints: Made, parallel: Parallel
) -> None:
    backbone = Backbone.load(checkpoints(name), parallel)
    found = []
    for bad in (False, True):
        batch = batch_of(backbone.shape.vocab)
        rows = batch.segments[0].length
        with activate(batch):
            embedded = backbone.embed(batch).clone()
            if bad:
                embedded[:rows] = float("nan")
            embedded.requires_grad_(True)
            total, nll = backbone.loss(backbone.forward(batch, embedded), batch)
            total.backward()
        assert embedded.grad is not None
        found.append((nll[rows - 1 :], embedded.grad[rows:]))
    for clean, beside in zip(*found, strict=True):
        assert clean.isfinite().all()
        assert torch.equal(clean, beside)
