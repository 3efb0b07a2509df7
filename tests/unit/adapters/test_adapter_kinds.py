"""Every kind and mixtures of them against plain PyTorch on full matrices, isolation, attachment and removal."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.adapters import base_op
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.low_rank import terms
from megatron_mux.kernels.low_rank.columns import Columns
from megatron_mux.runtime import Parallel
from tests.unit.adapters.plain import Reference
from tests.unit.adapters.toy import (
    Toy,
    adapter_tensors,
    assemble,
    attached,
    ia3,
    lora,
    make_batch,
    mixture,
    noise,
    task,
)

pytestmark = pytest.mark.versions

MIXTURE = mixture()
EXACT = 1e-10


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield runtime.initialize(device="cpu")
    runtime.shutdown()


def inputs(batch: PackedBatch, hidden: int) -> tuple[Tensor, Tensor]:
    """Hidden states of each task's rows, the same whatever the packing, and row weights (0 in padding)."""
    rows = torch.zeros(batch.rows, hidden, dtype=torch.float64)
    weights = torch.zeros(batch.rows, dtype=torch.float64)
    for name, (start, stop) in batch.task_rows.items():
        rows[start:stop] = noise(name + "rows", stop - start, hidden)
        weights[start:stop] = noise(name + "weights", stop - start)
    return rows, weights


def run(toy: Toy, adapters: AdapterSet, batch: PackedBatch, rows: Tensor, weights: Tensor) -> Tensor:
    """Forward and backward; the hidden states at the end."""
    for adapter in adapters.tasks.values():
        adapter.flat_params.zero()
    hidden, loss = toy.forward(batch, rows, weights)
    if loss.requires_grad:
        loss.backward()
    return hidden.detach()


def assert_same(found: Tensor, wanted: Tensor | None, what: str = "") -> None:
    """Equal to rounding, measured against the largest element."""
    assert wanted is not None, what
    assert not wanted.isnan().any(), what
    assert (found - wanted).abs().max() <= EXACT * wanted.abs().max().clamp(min=1.0), what


def gradients(adapters: AdapterSet, name: str) -> dict[str, Tensor]:
    """Full gradients of a task by key."""
    full = {}
    for p in adapters.tasks[name].parameters:
        full[p.key] = torch.zeros(p.full_shape, dtype=p.value.dtype)
        assemble(p, full[p.key], torch.zeros_like(p.value) if p.value.grad is None else p.value.grad)
    return full


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_mixture_equals_plain_pytorch(parallel: Parallel, bias: bool, training: bool) -> None:
    toy, adapters = attached(parallel, *MIXTURE, bias=bias)
    bare = lora("bare", target_modules=["q_proj"])  # a task of the batch whose adapter was never attached
    batch = make_batch([*MIXTURE, bare], training=training)
    rows, weights = inputs(batch, toy.shape.hidden)
    hidden = run(toy, adapters, batch, rows, weights)
    for spec in MIXTURE:
        start, stop = batch.task_rows[spec.name]
        tensors = {k: v.requires_grad_() for k, v in adapter_tensors(spec, toy.shape).items()}
        wanted, loss = Reference(toy.weights, spec, tensors, batch).forward(
            rows[start:stop], weights[start:stop]
        )
        loss.backward()
        assert_same(hidden[start:stop], wanted.detach(), spec.name)
        for key, gradient in gradients(adapters, spec.name).items():
            assert gradient.abs().sum() > 0, key
            assert_same(gradient, tensors[key].grad, f"{spec.name} {key}")


@pytest.mark.parametrize("spec", MIXTURE, ids=lambda s: s.name)
def test_gradient_of_the_input(parallel: Parallel, spec: Any) -> None:
    toy, adapters = attached(parallel)
    tensors = adapter_tensors(spec, toy.shape)
    adapters.add(spec, 9, tensors)
    batch = make_batch([spec], multiple=1)
    rows, weights = inputs(batch, toy.shape.hidden)
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    run(toy, adapters, batch, ours, weights)
    Reference(toy.weights, spec, tensors, batch).forward(theirs, weights)[1].backward()
    assert ours.grad is not None
    assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("bad", MIXTURE, ids=lambda s: s.name)
def test_poison_stays_in_its_task(parallel: Parallel, bad: Any, poison: float) -> None:
    """A neighbour's rows, then its parameters, are NaN or Inf: the others' outputs and gradients stay bit for bit."""
    toy, adapters = attached(parallel, *MIXTURE)
    batch = make_batch(MIXTURE)
    rows, weights = inputs(batch, toy.shape.hidden)
    others = [spec.name for spec in MIXTURE if spec.name != bad.name]

    def seen() -> list[Tensor]:
        hidden = run(toy, adapters, batch, rows, weights)
        found = [hidden[slice(*batch.task_rows[name])] for name in others]
        return found + [g for name in others for g in gradients(adapters, name).values()]

    wanted = seen()
    start, stop = batch.task_rows[bad.name]
    clean = rows[start:stop].clone()
    rows[start:stop] = poison
    for a, b in zip(seen(), wanted, strict=True):
        assert torch.equal(a, b)
    rows[start:stop] = clean
    for parameter in adapters.tasks[bad.name].parameters:
        parameter.value.data.fill_(poison)
    for a, b in zip(seen(), wanted, strict=True):
        assert torch.equal(a, b)


def test_alone_and_together_give_the_same_gradients(parallel: Parallel) -> None:
    toy, adapters = attached(parallel, *MIXTURE)
    batch = make_batch(MIXTURE)
    rows, weights = inputs(batch, toy.shape.hidden)
    run(toy, adapters, batch, rows, weights)
    found = {spec.name: gradients(adapters, spec.name) for spec in MIXTURE}
    for spec in MIXTURE:
        adapters.remove(spec.name)
    for place, spec in enumerate(MIXTURE):
        adapters.add(spec, 9, adapter_tensors(spec, toy.shape))
        own = make_batch([spec], multiple=1, first=place)
        run(toy, adapters, own, *inputs(own, toy.shape.hidden))
        for key, gradient in gradients(adapters, spec.name).items():
            assert_same(found[spec.name][key], gradient, key)
        adapters.remove(spec.name)


def test_attaching_and_removing_leaves_no_trace(parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    modules = [info.module for info in toy.infos]
    before = [
        (dict(m.__dict__), {k: v.clone() for k, v in m.state_dict().items() if v is not None})
        for m in modules
    ]
    names = [[n for n, _ in m.named_parameters()] for m in modules]
    batch = make_batch(MIXTURE)
    rows, weights = inputs(batch, toy.shape.hidden)
    bare = run(toy, adapters, batch, rows, weights)
    for spec in MIXTURE:
        adapters.add(spec, 9, adapter_tensors(spec, toy.shape))
    assert any("forward" in m.__dict__ for m in modules)
    assert [[n for n, _ in m.named_parameters()] for m in modules] == names
    assert not torch.equal(run(toy, adapters, batch, rows, weights), bare)
    for spec in reversed(MIXTURE):
        adapters.remove(spec.name)
    for module, (attributes, state) in zip(modules, before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert all(module.__dict__[key] is attributes[key] for key in attributes)
        assert all(torch.equal(module.state_dict()[key], value) for key, value in state.items())
    assert torch.equal(run(toy, adapters, batch, rows, weights), bare)


def test_removal_changes_nothing_for_others(parallel: Parallel) -> None:
    toy, adapters = attached(parallel, *MIXTURE)
    batch = make_batch(MIXTURE)
    rows, weights = inputs(batch, toy.shape.hidden)
    run(toy, adapters, batch, rows, weights)
    wanted = {spec.name: gradients(adapters, spec.name) for spec in MIXTURE}
    adapters.remove(MIXTURE[2].name)
    adapters.remove(MIXTURE[1].name)
    run(toy, adapters, batch, rows, weights)
    for spec in [MIXTURE[0], *MIXTURE[3:]]:
        for key, gradient in gradients(adapters, spec.name).items():
            assert_same(gradient, wanted[spec.name][key], key)


def test_fresh_adapters_change_nothing_and_depend_on_the_seed(parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    # Dropout disturbs an initial product, but not what is subtracted.
    fresh = [spec for spec in MIXTURE if spec.name not in ("prefix", "pissa-dora")]
    batch = make_batch(fresh)
    rows, weights = inputs(batch, toy.shape.hidden)
    bare = run(toy, adapters, batch, rows, weights)
    for spec in fresh:
        adapters.add(spec, 9)
    torch.testing.assert_close(run(toy, adapters, batch, rows, weights), bare, rtol=0, atol=1e-13)
    first = adapters.tasks["lora-qv"].parameters[0].value.detach().clone()
    bound = toy.shape.hidden**-0.5
    assert first.abs().max() <= bound and first.abs().max() > 0.7 * bound
    fields: dict[str, Any] = MIXTURE[0].adapter.model_dump()
    other, same = task("again", seed=8, **fields), task("same", seed=7, **fields)
    assert not torch.equal(adapters.add(other, 9).parameters[0].value, first)
    assert torch.equal(adapters.add(same, 9).parameters[0].value, first)


def test_only_the_first_adapter_needs_a_gradient_below_it(parallel: Parallel) -> None:
    """Frozen work below the first adapter leaves no graph: the input's gradient is neither needed nor computed."""
    toy, adapters = attached(parallel)
    spec = lora("one", target_modules=["model.layers.1.self_attn.q_proj"])
    adapters.add(spec, 9, adapter_tensors(spec, toy.shape))
    batch = make_batch([spec])
    rows, weights = inputs(batch, toy.shape.hidden)
    run(toy, adapters, batch, rows, weights)
    assert rows.grad is None and adapters.tasks["one"].parameters[0].value.grad is not None


def test_tables_are_prepared_when_tasks_have_come_or_gone_and_not_again(
    parallel: Parallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, adapters = attached(parallel)
    prepared: list[int] = []
    monkeypatch.setattr(base_op.AttachedBaseOp, "prepare", lambda op: prepared.append(op.info.layer))

    def times() -> int:
        monkeypatch.setattr(adapters.host, "device", torch.device("cuda"))
        adapters.prepare()
        adapters.prepare()
        monkeypatch.setattr(adapters.host, "device", torch.device("cpu"))
        found = len(prepared) // len(adapters.ops)
        prepared.clear()
        return found

    assert times() == 0
    adapters.add(lora("a"), 10)
    assert times() == 1
    adapters.remove("a")
    assert times() == 1


def test_nothing_is_left_to_the_first_launch(parallel: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading columns back from a GPU would make the host wait, for every term."""
    toy, adapters = attached(parallel)
    for name in "ab":
        adapters.add(lora(name, target_modules=["q_proj", "k_proj", "o_proj", "up_proj"]), 10)
    adapters.add(ia3("c", ["k_proj", "o_proj"], []), 10)

    def of(index: Tensor | None, width: int) -> Columns:
        assert index is None, "columns are read"
        return Columns.of(index, width)

    monkeypatch.setattr(terms, "Columns", SimpleNamespace(of=of))
    with_terms = 0
    for op in adapters.ops:
        op.prepare()
        for table in (op.tables.low_rank, *op.tables.before, *op.tables.after):
            assert not table.of_slot or "alignment" in vars(table)
            for term, _ in (placed for own in table.of_slot.values() for placed in own):
                assert term.place == Columns.of(term.columns, term.up.shape[0])
                with_terms += 1
    assert with_terms == (2 * 4 + 2) * toy.shape.layers
