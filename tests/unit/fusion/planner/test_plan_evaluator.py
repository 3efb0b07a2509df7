"""What is predicted of a plan is what a simulation of its template says, steps that follow without a flush included."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.cost import entry_orders, seconds_per_step
from megatron_mux.fusion.planner.plan_evaluator import PlanEvaluator
from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext
from megatron_mux.fusion.step import bucket_costs, step_chunks, step_template
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate
from tests.unit.fusion import backbone
from tests.unit.pipeline.idle import busy_seconds


def evaluator(seed: int, mesh: Mesh, **changes: object) -> PlanEvaluator:
    changes["tables"] = backbone.MadeUpTables()
    context = PlanningContext(backbone.profile(), backbone.info(), mesh, **changes)  # type: ignore[arg-type]
    return PlanEvaluator(context.with_tasks(backbone.random_loads(seed)))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([Mesh(), Mesh(pipeline=2), Mesh(pipeline=4), Mesh(pipeline=2, split=(2, 2, 2, 2))]),
    st.sampled_from(["spatial", "temporal"]),
    st.sampled_from([1, 2, ROLLING_STEPS]),
)
def test_predictions_are_those_of_simulated_templates(
    seed: int, mesh: Mesh, policy: str, rolling: int
) -> None:
    made = evaluator(seed, mesh, rolling=rolling)
    found = made.with_longest(made.evaluate(made.of_policy(policy)))  # type: ignore[arg-type]
    plan = found.plan
    costs, sizes = [bucket_costs(bucket) for bucket in plan.buckets], step_chunks(plan, made.lengths).sizes
    runs = {
        steps: simulate(step_template(plan, sizes * steps), costs, sizes=sizes * steps)
        for steps in range(1, min(plan.rolling, 3) + 1)
    }
    work = max(busy_seconds(runs[1]))
    latency = seconds_per_step(lambda steps: runs[steps].latency, work, plan.rolling)
    overhead = made._overhead(plan)
    assert latency is not None and found.latency == pytest.approx(latency + overhead, rel=1e-9)
    for rank in range(plan.ranks):
        kept = max(run.peaks[rank] for run in runs.values())
        assert found.memory[rank] >= made.resident[rank] + kept * (1 - 1e-9)


def test_eight_steps_take_what_is_predicted() -> None:
    errors = []
    for seed in range(12):
        made = evaluator(seed, Mesh(pipeline=2), rolling=ROLLING_STEPS)
        found = made.best_order(made.of_policy("temporal"))
        plan, steps = found.plan, ROLLING_STEPS
        sizes = step_chunks(plan, made.lengths).sizes * steps
        costs = [bucket_costs(bucket) for bucket in plan.buckets]
        simulated = simulate(step_template(plan, sizes), costs, sizes=sizes).latency / steps
        overhead = made._overhead(plan)
        errors.append(abs((found.latency - overhead) / simulated - 1))
    assert max(errors) < 0.02


def test_the_best_of_several_entry_orders_is_taken() -> None:
    gains = []
    for seed in range(12):
        made = evaluator(seed, Mesh(pipeline=4), rolling=ROLLING_STEPS)
        plan = made.of_policy("temporal")
        best = made.best_order(plan)
        costs = [bucket_costs(bucket) for bucket in made.evaluate(plan).plan.buckets]
        orders = entry_orders(costs)
        assert all(sorted(order) == list(range(len(costs))) for order in orders)
        found = [
            made.evaluate(replace(plan, buckets=tuple(plan.buckets[i] for i in order))) for order in orders
        ]
        assert best.latency <= min(one.latency for one in found) * 1.002
        gains.append(found[0].latency / best.latency - 1)
    assert max(gains) > 0.002, "descending is not always the best order of steps that follow without a flush"


def test_entry_orders() -> None:
    buckets = [BucketCost(1, (seconds, 1.0), (1.0, 1.0)) for seconds in (1.0, 4.0, 2.0, 3.0)]
    assert entry_orders(buckets) == [[1, 3, 2, 0], [0, 2, 3, 1], [1, 0, 3, 2]]
    assert entry_orders(buckets[:1]) == [[0]]
    assert entry_orders([BucketCost(1, (seconds,), (1.0,)) for seconds in (1.0, 2.0)]) == [[1, 0]]


def test_a_step_takes_at_least_the_work_of_the_busiest_rank() -> None:
    assert seconds_per_step({1: 5.0}.__getitem__, 3.0, 1) == 5.0
    assert seconds_per_step({1: 5.0, 2: 8.0}.__getitem__, 3.0, 2) == 4.0
    assert seconds_per_step({1: 5.0, 3: 13.0}.__getitem__, 3.0, 8) == (13.0 + 5 * 4.0) / 8
    assert seconds_per_step({1: 5.0, 3: 10.0}.__getitem__, 3.0, 8) == (10.0 + 5 * 3.0) / 8
    assert seconds_per_step({3: 13.0}.__getitem__, 3.0, 8, below=3.5) is None, "one simulation tells"
