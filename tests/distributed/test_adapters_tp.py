"""Adapters at tensor-parallel sizes 2 and 4 against one rank: gradients, ownership, the final mask of diff pruning.

The toy model has layers whose key-value heads are as many as, and fewer than, the tensor ranks. Losses are summed over
ranks, so a gradient that some rank lacks, or counts twice, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.adapters.host import Host
from megatron_mux.runtime import Parallel
from tests.unit.adapters.toy import Toy, adapter_tensors, assemble, make_batch, mixture, noise, sizes

CASES = [(2, 1, False), (2, 2, True), (4, 2, False), (4, 4, True), (4, 1, True)]
Divide = Callable[..., Parallel]


def alone(parallel: Parallel) -> Any:
    """One rank by itself."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    # What of a `Parallel` adapters and the toy use.
    return SimpleNamespace(
        tp_rank=0, tp_size=1, tp_group=group, device=parallel.device, sequence_parallel=False
    )


def step(toy: Toy, adapters: AdapterSet, training: bool = True) -> dict[str, dict[str, Tensor]]:
    """Gradients of a step as full tensors by task and key, the same on every rank."""
    parallel, specs = toy.parallel, mixture()
    batch = make_batch(specs, multiple=4, training=training)
    rows = noise("rows", batch.rows, toy.shape.hidden)
    weights = torch.zeros(batch.rows, dtype=torch.float64)
    for name, (start, stop) in batch.task_rows.items():
        weights[start:stop] = noise(name + "weights", stop - start)
    if parallel.sequence_parallel:
        rows = rows.chunk(parallel.tp_size)[parallel.tp_rank]
    toy.forward(batch, rows, weights)[1].backward()
    return {
        name: {p.key: full(toy.parallel, p, gradient(parallel, p)) for p in a.parameters}
        for name, a in adapters.tasks.items()
    }


def gradient(parallel: Any, parameter: Any) -> Tensor:
    """The local gradient made whole, as the engine does."""
    value = parameter.value
    found = torch.zeros_like(value) if value.grad is None else value.grad.clone()
    if parallel.tp_size > 1 and parameter.partial:
        dist.all_reduce(found, group=parallel.tp_group)
    return found


def full(parallel: Any, parameter: Any, local: Tensor) -> Tensor:
    """Assembled from owners alone; their number must be one for every element."""
    whole, count = torch.zeros(parameter.full_shape, dtype=local.dtype), torch.zeros(parameter.full_shape)
    if parameter.owner:
        assemble(parameter, whole, local)
        assemble(parameter, count, torch.ones_like(local))
    if parallel.tp_size > 1:
        dist.all_reduce(whole, group=parallel.tp_group)
        dist.all_reduce(count, group=parallel.tp_group)
    assert (count == 1).all(), parameter.key
    # What several ranks hold must be equal on all of them, or they drift apart.
    close(local, parameter.slice_of(whole), parameter.key)
    return whole


def close(a: Tensor, b: Tensor, what: str) -> None:
    # A rank may hold nothing of a module.
    assert not b.numel() or (a - b).abs().max() <= 1e-10 * b.abs().max().clamp(min=1.0), what


@pytest.mark.parametrize(
    ("tp", "kv_heads", "sequence_parallel", "training"),
    [*((*case, True) for case in CASES), (2, 2, False, False), (4, 1, True, False)],
)
def test_gradients_do_not_depend_on_ranks(
    joined: Divide, tp: int, kv_heads: int, sequence_parallel: bool, training: bool
) -> None:
    parallel = joined(tp, 1, sequence_parallel)
    shape = sizes(heads=4, kv_heads=kv_heads)
    found = {}
    for where in (alone(parallel), parallel):
        toy = Toy(shape, where)
        adapters = AdapterSet(Host(toy.infos, where, torch.float64, shape))
        for spec in mixture():
            adapters.add(spec, 9, adapter_tensors(spec, shape))
        found[where is parallel] = step(toy, adapters, training)
    for name, gradients in found[False].items():
        for key, wanted in gradients.items():
            close(found[True][name][key], wanted, f"{name} {key}")


@pytest.mark.parametrize(("tp", "kv_heads", "sequence_parallel"), [(2, 2, False), (4, 2, True)])
def test_fresh_values_and_masks_do_not_depend_on_ranks(
    joined: Divide, tp: int, kv_heads: int, sequence_parallel: bool
) -> None:
    parallel = joined(tp, 1, sequence_parallel)
    shape = sizes(heads=4, kv_heads=kv_heads)
    values: list[dict[str, Tensor]] = []
    for where in (alone(parallel), parallel):
        toy = Toy(shape, where)
        adapters = AdapterSet(Host(toy.infos, where, torch.float64, shape, weights=toy.weights.matrices.get))
        for spec in mixture():
            initial = adapter_tensors(spec, shape) if spec.name == "diff" else None
            adapters.add(spec, 9, initial)
        found = {
            f"{n} {p.key}": full(where, p, p.value.detach())
            for n, a in adapters.tasks.items()
            for p in (*a.parameters, *a.fixed)
        }
        diff = adapters.tasks["diff"]
        diff.after_step(6)
        state = diff.state()
        for p in diff.parameters:
            found[f"frozen {p.key}"] = full(where, p, p.value.detach())
            if p.key in state:
                found[f"mask {p.key}"] = full(where, p, state[p.key].double())
        # Put back from full tensors, as a resume does.
        diff.load_state(
            {k.removeprefix("mask "): v.to(torch.uint8) for k, v in found.items() if k.startswith("mask ")}
        )
        assert all(torch.equal(diff.state()[k], v) for k, v in state.items())
        values.append(found)
    assert values[0].keys() == values[1].keys()
    for key, wanted in values[0].items():
        assert torch.equal(values[1][key], wanted), key
