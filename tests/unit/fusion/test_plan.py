"""A plan is data: it follows from the policy, survives JSON, and covers each task once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.fusion.plan import Plan, Policy, dumps, plan_for

accumulations = st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.integers(1, 8), max_size=6)
policies = st.sampled_from(["serial", "temporal", "spatial"])


@given(policies, accumulations, st.integers(1, 8))
def test_plan_survives_json_and_covers_each_task_once(
    policy: Policy, accumulation: dict[str, int], stages: int
) -> None:
    plan = plan_for(policy, accumulation, stages)
    assert Plan.from_json(json.loads(dumps(plan))) == plan
    expected = list(accumulation)[:1] if policy == "serial" else list(accumulation)
    assert list(plan.tasks) == expected
    for bucket in plan.buckets:
        assert bucket.micro_batches >= max(accumulation[name] for name in bucket.tasks)


def test_spatial_fills_a_pipeline_with_micro_batches() -> None:
    assert plan_for("spatial", {"a": 1, "b": 2}, 2).buckets[0].micro_batches == 4
    assert plan_for("spatial", {"a": 1, "b": 2}, 1).buckets[0].micro_batches == 2
    assert plan_for("spatial", {"a": 1, "b": 2}, 2, micro_batches=3).buckets[0].micro_batches == 3


def test_temporal_gives_each_task_a_bucket() -> None:
    plan = plan_for("temporal", {"a": 1, "b": 2}, 2)
    assert [b.tasks for b in plan.buckets] == [("a",), ("b",)]
    assert "bucket 1: b in 2" in str(plan)


@pytest.mark.parametrize("value", [{}, {"policy": "spatial", "stages": 1, "buckets": [{}]}])
def test_what_is_not_a_plan_is_refused(value: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError)):
        Plan.from_json(value)
