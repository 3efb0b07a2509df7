"""Limits of memory: a plan under one always has one, and keeps to it in the simulator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.cost import bucket_cost, kept_limit
from megatron_mux.fusion.planner.plan_evaluator import PlanEvaluator
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext
from megatron_mux.fusion.step import step_grid, step_template
from megatron_mux.pipeline.action import Unit
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.structured import StructuredRun
from tests.unit.fusion import backbone

MESHES = (Mesh(), Mesh(pipeline=2), Mesh(pipeline=4), Mesh(pipeline=2, split=(2, 2, 2, 2)), Mesh(1, 2, 2))


def most_bytes(plan: Plan, context: PlanningContext) -> float:
    """The peak of three steps, on the rank where it comes nearest to the limit, from every chunk's own cost."""
    made = PlanEvaluator(context)
    peaks = []
    for pipeline in range(plan.data):
        grid = step_grid(plan, made.lengths, pipeline)
        costs = {unit: bucket_cost(made.costs.chunks(chunks)) for unit, chunks in grid.chunks.items()}
        run = simulate(
            step_template(plan, grid.sizes * 3), [_bare(b, plan) for b in plan.buckets], sizes=grid.sizes * 3
        )
        for rank, actions in enumerate(run.timed):
            kept = most = 0.0
            for action in (timed.action for timed in actions if timed.action.is_pass):
                unit = Unit(action.bucket % len(plan.buckets), action.micro_batch, action.chunk)
                own, s = costs[unit], action.stage
                kept += own.memory[s] * (action.kind == "F")
                most = max(most, kept + own.working[s])
                kept -= own.memory[s] * (action.kind == "B")
            peaks.append(made.resident[rank] + most)
    return max(peaks)


def _bare(bucket: Any, plan: Plan) -> BucketCost:
    return BucketCost(bucket.micro_batches, bucket.forward, bucket.backward, transfer=bucket.transfer)


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 10_000), st.sampled_from(MESHES), st.floats(0.0, 1.1))
def test_a_plan_under_a_limit_has_one_and_keeps_to_it(seed: int, mesh: Mesh, share: float) -> None:
    loads = backbone.random_loads(seed, 1 + seed % 5)
    context = PlanningContext(backbone.profile(), backbone.info(), mesh, rolling=ROLLING_STEPS).with_tasks(
        loads
    )
    made = PlanEvaluator(context)
    resident, free = max(made.resident), max(made.evaluate(made.of_policy("spatial")).memory)
    limited = Planner(
        PlanningContext(**{**vars(context), "memory_limit": resident + share * (free - resident)})
    )
    try:
        plan = limited.plan(loads)
    except UserError:
        with pytest.raises(UserError):
            limited.check(loads)
        return
    assert (
        limited.memory_limit is not None and limited.fits(plan) and len(plan.activation_limit) == plan.ranks
    )
    assert most_bytes(plan, context) <= limited.memory_limit * (1 + 1e-6)


def test_what_one_bucket_works_with_is_no_reason_to_drop_the_limit() -> None:
    """One bucket keeps 9 of 10 bytes, the other works with 5: each fits, the first alone."""
    buckets = [
        BucketCost(3, (1.0, 1.0), (2.0, 2.0), memory=(9.0, 9.0)),
        BucketCost(3, (1.0, 1.0), (2.0, 2.0), memory=(1.0, 1.0), working=(5.0, 5.0)),
    ]
    limit = kept_limit(buckets, [10.0, 10.0])
    assert limit == [5.0, 5.0]
    run = StructuredRun(buckets, limit)
    assert max(run.peaks()) <= 10.0
    assert simulate(run.template(), buckets).peaks == tuple(run.peaks())
