"""Packs cut into chunks give the losses and gradients of packs that are not cut, under every adapter kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.fusion.plan import plan_for
from megatron_mux.fusion.step import Lengths, step_chunks
from megatron_mux.runtime import Parallel
from tests.end_to_end.conftest import BackboneOf, PathOf
from tests.end_to_end.families import FAMILIES, bottleneck, diff_pruning, ia3, lora, prefix
from tests.end_to_end.harness import Case, random_records

STEPS = 3
LONGEST = 40
CHUNK = 5  # eight chunks


class Watched(Engine):
    """Keeps each step's gradients as they are before clipping."""

    gradients: dict[str, Tensor]

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        self.gradients = {}
        super().register_tasks(tasks)
        for name in (task.spec.name for task in tasks):
            self._tasks[name].optimizer.clip = partial(self._clip, name)  # type: ignore[method-assign]

    def _clip(self, name: str, norm: Tensor) -> None:
        running = self._tasks[name]
        self.gradients |= {
            f"{name}: {p.key}": p.value.grad.clone()  # type: ignore[union-attr]
            for p in running.adapter.parameters
        }
        TaskOptimizer.clip(running.optimizer, norm)


def cases_of(family: str) -> list[Case]:
    targets = FAMILIES[family]
    adapters = {
        "lora": lora(targets.query_value, r=4),
        "mixed": lora(targets.mixed, r=3, lora_dropout=0.2),
        "scales": ia3(targets),
        "prefix": prefix(3),
        "bottleneck": bottleneck(targets.outputs, size=5),
        "pruned": diff_pruning(targets.query_value),
        "upper": lora(".*[23].*(q_proj|c_attn).*", r=4),
    }
    training = {"per_device_train_batch_size": 3, "optim": "sgd", "learning_rate": 0.3, "max_steps": 9}
    cases = []
    for i, (name, adapter) in enumerate(adapters.items()):
        longest = LONGEST if i % 2 == 0 else 7  # some tasks fit into a chunk, some do not
        records = random_records(9, 96, 4, longest, seed=i)
        records.pairs[1] = (torch.arange(LONGEST) % 96, torch.arange(LONGEST) >= LONGEST - 2)
        cases.append(Case(name, adapter, training, records))
    return cases


def trained(
    backbone: Backbone, parallel: Parallel, cases: list[Case], chunk: int | None, micro_batches: int
) -> tuple[list[float], dict[str, Tensor]]:
    planning = Planning("spatial", 1, micro_batches=micro_batches, chunk=chunk)
    engine = Watched(backbone, parallel, planning)
    engine.register_tasks([case.task for case in cases])
    try:
        losses = [result.loss for _ in range(STEPS) for result in engine.step().values()]
        return losses, engine.gradients
    finally:
        for case in cases:
            engine.remove_task(case.name)


def assert_same(found: tuple[list[float], dict[str, Tensor]], wanted: Any, limit: float) -> None:
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert ours == pytest.approx(theirs, rel=limit, abs=limit)
    assert found[1].keys() == wanted[1].keys()
    for key, theirs in wanted[1].items():
        assert theirs.norm() > 0, f"{key}: nothing to compare"
        assert (found[1][key] - theirs).norm() <= limit * theirs.norm(), key


@pytest.mark.parametrize(
    ("family", "micro_batches"), [("llama", 2), ("mistral", 1), ("gpt2", 2), ("gpt_neo", 1), ("qwen3", 2)]
)
def test_exact_in_fp64(family: str, micro_batches: int, backbone_of: BackboneOf, parallel: Parallel) -> None:
    backbone, cases = backbone_of(family, torch.float64), cases_of(family)
    whole = trained(backbone, parallel, cases, None, micro_batches)
    for chunk in (CHUNK, 16):
        assert_same(trained(backbone, parallel, cases, chunk, micro_batches), whole, 1e-10)


@pytest.mark.parametrize("family", ["llama", "gpt_neo"])
def test_close_in_fp32(family: str, backbone_of: BackboneOf, parallel: Parallel) -> None:
    backbone, cases = backbone_of(family), cases_of(family)
    whole = trained(backbone, parallel, cases, None, 1)
    assert_same(trained(backbone, parallel, cases, CHUNK, 1), whole, 5e-5)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_exact_with_recomputation(recompute: str, path_of: PathOf, parallel: Parallel) -> None:
    backbone = Backbone.load(path_of("llama"), parallel, torch.float64, recompute)  # type: ignore[arg-type]
    plain = Backbone.load(path_of("llama"), parallel, torch.float64)
    cases = cases_of("llama")
    whole = trained(plain, parallel, cases, None, 1)
    assert_same(trained(backbone, parallel, cases, CHUNK, 1), whole, 1e-10)


def test_packs_do_span_eight_chunks() -> None:
    cases = cases_of("llama")
    plan = plan_for("spatial", {case.name: 1 for case in cases}, 1, chunk=CHUNK)
    lengths = {}
    for case in cases:
        pairs = case.records.pairs[:3]
        lengths[case.name] = Lengths(tuple(len(t) for t, _ in pairs), tuple(int(m.sum()) for _, m in pairs))
    assert step_chunks(plan, lengths).sizes == ((8,),)


@pytest.mark.parametrize("alignment", ["max-length", "longest"])
def test_padding_changes_nothing(alignment: Any, backbone_of: BackboneOf, parallel: Parallel) -> None:
    backbone, cases = backbone_of("llama", torch.float64), cases_of("llama")[:3]
    whole = trained(backbone, parallel, cases, None, 1)
    engine = Watched(backbone, parallel, Planning("spatial", 1, chunk=16, alignment=alignment))
    engine.register_tasks([case.task for case in cases])
    try:
        losses = [result.loss for _ in range(STEPS) for result in engine.step().values()]
        assert_same((losses, engine.gradients), whole, 1e-10)
    finally:
        for case in cases:
            engine.remove_task(case.name)


def test_a_neighbour_that_is_not_finite_stays_alone(backbone_of: BackboneOf, parallel: Parallel) -> None:
    backbone, cases = backbone_of("llama", torch.float64), cases_of("llama")[:2]
    found = []
    for spoilt in (False, True):
        engine = Watched(backbone, parallel, Planning("spatial", 1, chunk=CHUNK))
        engine.register_tasks([case.task for case in cases])
        if spoilt:
            for p in engine._tasks["mixed"].adapter.parameters:
                p.value.data.fill_(float("nan"))
        results = engine.step()
        found.append((results["lora"].loss, {k: g for k, g in engine.gradients.items() if "lora:" in k}))
        assert (results["mixed"].status == "failed") is spoilt
        for case in cases:
            engine.remove_task(case.name)
    assert found[0][0] == found[1][0]
    for key, gradient in found[0][1].items():
        assert torch.equal(gradient, found[1][1][key])
