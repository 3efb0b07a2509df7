"""Diff pruning: the relaxed mask, its penalty, the schedule that ends at the requested sparsity, resume."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_mux import runtime
from megatron_mux.adapters.diff_pruning import gate
from megatron_mux.runtime import Parallel
from tests.unit.adapters.plain import Reference
from tests.unit.adapters.test_adapter_kinds import gradients, inputs, run
from tests.unit.adapters.toy import adapter_tensors, attached, diff, make_batch


@pytest.fixture(scope="module")
def parallel() -> Iterator[Parallel]:
    yield runtime.initialize(device="cpu")
    runtime.shutdown()


TARGETS = ["q_proj", "o_proj", "up_proj"]


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.995])
def test_ends_at_the_requested_sparsity(parallel: Parallel, sparsity: float) -> None:
    toy, adapters = attached(parallel)
    spec = diff("diff", TARGETS, sparsity)
    adapter = adapters.add(spec, 9)
    optimizer = torch.optim.AdamW([p.value for p in adapter.parameters], lr=0.05, weight_decay=0.0)
    for step in range(9):
        batch = make_batch([spec])
        batch.task_steps = {"diff": step}
        run(toy, adapters, batch, *inputs(batch, toy.shape.hidden))
        adapter.penalty(step)
        optimizer.step()
        adapter.after_step(step + 1)
        assert bool(adapter.state()) == (step + 1 >= 6)
    for weight, log_alpha in zip(adapter.parameters[::2], adapter.parameters[1::2], strict=True):
        assert int((weight.value == 0).sum()) == round(sparsity * weight.value.numel()), weight.key
        assert torch.equal(weight.value * gate(log_alpha.value, None)[0], weight.value)
    batch = make_batch([spec], training=False)
    first = run(toy, adapters, batch, *inputs(batch, toy.shape.hidden))
    assert torch.equal(run(toy, adapters, batch, *inputs(batch, toy.shape.hidden)), first)


def test_a_skipped_step_freezes_nothing(parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    spec = diff("diff", TARGETS, 0.75)
    adapter = adapters.add(spec, 3, adapter_tensors(spec, toy.shape))
    before = [p.value.clone() for p in adapter.parameters]
    adapter.after_step(2, torch.tensor(True))
    adapter.rollback_after(1)
    assert all(torch.equal(p.value, value) for p, value in zip(adapter.parameters, before, strict=True))
    assert not adapter.state()
    adapter.after_step(2, torch.tensor(False))
    adapter.rollback_after(2)
    assert len(adapter.state()) == len(adapter.parameters) / 2


def test_keeps_the_largest_and_resumes_exactly(parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    spec = diff("diff", TARGETS, 0.75)
    tensors = adapter_tensors(spec, toy.shape)
    adapter = adapters.add(spec, 3, tensors)
    adapter.after_step(2)
    for p in adapter.parameters[::2]:
        effective = tensors[p.key] * gate(tensors[p.key.replace("weight", "log_alpha")], None)[0]
        smallest = effective.abs().flatten().sort(descending=True).values[effective.numel() // 4 - 1]
        assert torch.equal(p.value != 0, (effective.abs() >= smallest) & (effective != 0))
    batch = make_batch([spec])
    rows, weights = inputs(batch, toy.shape.hidden)
    run(toy, adapters, batch, rows, weights)
    wanted = gradients(adapters, "diff")
    saved = {p.key: p.value.detach().clone() for p in adapter.parameters}
    state = adapter.state()
    leaves = {k: v.clone().requires_grad_() for k, v in saved.items()}
    reference = Reference(toy.weights, spec, leaves, batch, {k: v.double() for k, v in state.items()})
    own = slice(*batch.task_rows["diff"])
    reference.forward(rows[own], weights[own])[1].backward()
    for key, mask in state.items():
        torch.testing.assert_close(wanted[key], leaves[key].grad, rtol=0, atol=1e-10)
        assert (wanted[key][mask == 0] == 0).all()
    adapters.remove("diff")
    again = adapters.add(spec, 3, saved)
    again.load_state(state)
    run(toy, adapters, batch, rows, weights)
    for key, gradient in gradients(adapters, "diff").items():
        assert torch.equal(gradient, wanted[key])
    assert all(torch.equal(again.state()[key], state[key]) for key in state)


def test_penalty_is_the_expected_number_of_nonzeros(parallel: Parallel) -> None:
    toy, adapters = attached(parallel)
    spec = diff("diff", TARGETS)
    adapter = adapters.add(spec, 9, adapter_tensors(spec, toy.shape))
    value = adapter.penalty(0)
    expected = torch.zeros((), dtype=torch.float64)
    logits = [p.value.detach().clone().requires_grad_() for p in adapter.parameters[1::2]]
    for x in logits:
        expected = expected + 1e-3 * torch.sigmoid(x).sum()
    expected.backward()
    torch.testing.assert_close(torch.as_tensor(value, dtype=torch.float64), expected.detach())
    for p, x in zip(adapter.parameters[1::2], logits, strict=True):
        torch.testing.assert_close(p.value.grad, x.grad)
    adapter.after_step(6)
    assert adapter.penalty(6) == 0.0
