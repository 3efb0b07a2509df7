"""Simulates steps of a plan: their seconds, and what ranks keep and take."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.cost import busiest, seconds_per_step
from megatron_mux.fusion.step import is_structured, step_template
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.structured import StructuredRun


def step_of(
    plan: Plan, costs: Sequence[BucketCost], sizes: list[tuple[int, ...]]
) -> tuple[float, list[float]]:
    """Seconds of a step of a plan on one pipeline, and `[ranks]` the most bytes that its passes keep and take."""
    most = [0.0] * plan.ranks
    is_own = is_structured(plan, sizes)  # its scheduler is a simulation already

    def simulated(steps: int) -> float:
        if not is_own:
            schedule = simulate(step_template(plan, sizes * steps), costs, sizes=sizes * steps)
            most[:] = map(max, most, schedule.peaks)
            return schedule.latency
        run = StructuredRun(costs, plan.activation_limit or None, sizes * steps, plan.virtual)
        if any(any(cost.memory) or any(cost.working) for cost in costs):
            most[:] = map(max, most, run.peaks())
        return run.latency

    # A bucket by itself waits for its own step to end: its steps are alike.
    steps = 1 if len(costs) == 1 and is_own else plan.rolling
    seconds = seconds_per_step(simulated, busiest(costs, sizes, plan.ranks), steps)
    assert seconds is not None, "without a bound there is an answer"
    return seconds, most
