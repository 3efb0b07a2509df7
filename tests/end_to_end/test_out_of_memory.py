"""A pass that runs out of memory: its tasks repeat the step in smaller parts or wait, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine import Engine, Planning, StepResult
from megatron_mux.runtime import Parallel
from tests.budget import Budget, failing, on_the_host
from tests.end_to_end.conftest import BackboneOf
from tests.end_to_end.families import FAMILIES, diff_pruning, lora
from tests.end_to_end.harness import Case, assert_close, assert_same, random_records

Results = dict[str, list[StepResult]]
Tensors = dict[str, dict[str, torch.Tensor]]
When = Callable[[PackedBatch, Engine], bool]
STEPS = 5


def cases_of() -> list[Case]:
    targets = FAMILIES["llama"].query_value
    adapters = {
        "lora": lora(targets, r=4, lora_dropout=0.2),
        "pruned": diff_pruning(targets),
        "big": lora(targets, r=2),
    }
    cases = []
    for i, (name, adapter) in enumerate(adapters.items()):
        training = {
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "max_steps": STEPS + (name == "big"),
        }
        cases.append(Case(name, adapter, training, random_records(10, 96, 4, 24, seed=i)))
    return cases


class Run:
    """Every task to its end, as the loop does it."""

    def __init__(self, engine: Engine, turn: int = 100) -> None:
        engine.register_tasks([case.task for case in cases_of()])
        self.results: Results = {name: [] for name in engine.tasks}
        self.tensors: Tensors = {}
        self.finished: list[str] = []
        for _ in range(200):
            if not engine.active:
                break
            for step in engine.steps(turn):
                for name, result in step.items():
                    self.results[name].append(result)
                    if result.status != "running":
                        with on_the_host():
                            self.tensors[name] = engine.adapter_tensors(name) or {}
                        self.finished.append(name)
            for name in set(self.finished) & set(engine.tasks):
                engine.remove_task(name)
        self.log_lines = engine.planning.log_lines

    def steps(self, name: str) -> list[int]:
        return [result.step for result in self.results[name]]


@pytest.fixture
def run(backbone_of: BackboneOf, parallel: Parallel) -> Callable[..., Run]:
    def go(
        policy: Any, when: When = lambda batch, engine: False, turn: int = 100, tries_plans: bool = False
    ) -> Run:
        backbone = backbone_of("llama", torch.float64)
        engine = Engine(backbone, parallel, Planning(policy, 1), tries_plans)
        with failing([backbone], lambda batch: when(batch, engine)):
            return Run(engine, turn)

    return go


@pytest.mark.parametrize("turn", [1, 100])
def test_what_runs_out_of_memory_is_cut_and_nobody_else_loses_a_step(
    run: Callable[..., Run], turn: int
) -> None:
    undisturbed = run("temporal", turn=turn)
    disturbed = run("temporal", lambda batch, _: batch.task_rows.keys() == {"big"} and batch.rows > 20, turn)
    assert any("big: out of memory (rank 0 at 0F" in said for said in disturbed.log_lines)
    for name, wanted in undisturbed.results.items():
        assert disturbed.steps(name) == list(range(1, wanted[-1].total_steps + 1)), "each step once"
        if name == "big":
            assert_close(disturbed.tensors[name], undisturbed.tensors[name], 1e-9, name)
        else:
            assert disturbed.results[name] == wanted, "bit for bit"
            assert_same(disturbed.tensors[name], undisturbed.tensors[name], name)


def test_a_batch_of_all_tasks_is_cut_until_it_fits(run: Callable[..., Run]) -> None:
    undisturbed = run("spatial")
    disturbed = run("spatial", lambda batch, _: batch.rows > 26)
    assert "2 micro-batch" in disturbed.log_lines[0] and len(disturbed.log_lines) > 2
    for name, wanted in undisturbed.results.items():
        assert disturbed.steps(name) == [result.step for result in wanted]
        assert [r.loss for r in disturbed.results[name]] == pytest.approx([r.loss for r in wanted], rel=1e-9)
        assert_close(disturbed.tensors[name], undisturbed.tensors[name], 1e-9, name)


@pytest.mark.parametrize(
    ("policy", "tries_plans"), [("temporal", False), ("spatial", True), ("spatial", False), ("serial", True)]
)
def test_a_task_that_fits_alone_only_waits_for_the_others(
    run: Callable[..., Run], policy: str, tries_plans: bool
) -> None:
    def others_are_there(batch: PackedBatch, engine: Engine) -> bool:
        return "big" in batch.task_rows and policy != "serial" and len(engine.tasks) == len(cases_of())

    found = run(policy, others_are_there, 1, tries_plans)
    assert found.finished[-1] == "big" and [r.status for r in found.results["big"]][-1] == "finished"
    assert found.steps("big") == list(range(1, STEPS + 2))
    if policy != "serial":
        verb = "runs" if tries_plans else "is repeated"
        assert any(f"the step {verb} once another task has left" in said for said in found.log_lines)


@pytest.mark.parametrize("tries_plans", [False, True])
def test_a_task_that_never_fits_fails_alone(run: Callable[..., Run], tries_plans: bool) -> None:
    found = run("spatial", lambda batch, _: "big" in batch.task_rows, 3, tries_plans)
    (last,) = found.results["big"]
    assert (last.status, last.step) == (
        "failed",
        0,
    ) and "one sequence of it alone ran out of memory" in last.reason
    assert all(found.results[name][-1].status == "finished" for name in ("lora", "pruned"))


def test_a_task_that_diverged_before_memory_ran_out_is_no_hindrance(
    backbone_of: BackboneOf, parallel: Parallel
) -> None:
    """In one turn: the first loses its way in one of its first steps, then the pass of both finds no memory."""
    targets, steps = FAMILIES["llama"].query_value, 6
    wild: dict[str, Any] = {"per_device_train_batch_size": 3, "learning_rate": 1e308, "max_steps": steps}
    wild |= {"optim": "sgd", "max_grad_norm": 0.0}
    calm = {"per_device_train_batch_size": 3, "max_steps": steps}
    records = random_records(6, 96, 4, 12, seed=1)
    cases = [
        Case("wild", lora(targets, r=2, lora_alpha=1e6), wild, records),
        Case("calm", lora(targets, r=2), calm, records),
    ]
    backbone = backbone_of("llama", torch.float64)
    engine = Engine(backbone, parallel, Planning("spatial", 1))
    engine.register_tasks([case.task for case in cases])
    passes = 0

    def fails(batch: PackedBatch) -> bool:
        nonlocal passes
        passes += 1
        return passes == 5

    with failing([backbone], fails):
        first = engine.steps(steps)
        assert [step["wild"].status for step in first if "wild" in step][-1] == "failed"
        taken = [step["calm"].step for step in first if "calm" in step]
        while engine.active:
            taken += [step["calm"].step for step in engine.steps(steps)]
    assert taken == list(range(1, steps + 1))


@pytest.mark.parametrize(("policy", "share"), [("temporal", 0.85), ("spatial", 0.6)])
def test_within_a_budget_of_bytes_every_task_finishes_all_the_same(
    policy: Any, share: float, backbone_of: BackboneOf, parallel: Parallel
) -> None:
    backbone = backbone_of("llama", torch.float64)
    with Budget() as unlimited:
        wanted = Run(Engine(backbone, parallel, Planning(policy, 1)))
    with Budget(unlimited.peak * share) as budget:
        found = Run(Engine(backbone, parallel, Planning(policy, 1)))
    assert budget.peak <= unlimited.peak * share
    assert budget.failures and found.log_lines, "some of them in backward passes"
    for name in wanted.results:
        assert found.steps(name) == wanted.steps(name)
        assert_close(found.tensors[name], wanted.tensors[name], 1e-9, name)
