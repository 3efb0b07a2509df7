"""A plan is data: it follows from the policy, survives JSON, covers each task once, tells what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Mode, Weights
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, dumps, plan_for
from tests.unit.fusion.strategies import groupings, one_each

Fixed = Literal["serial", "temporal", "spatial"]

task_names = st.text("abcdef", min_size=1, max_size=4)
accumulations = st.dictionaries(task_names, st.integers(1, 8), max_size=6)
policies = st.sampled_from(["serial", "temporal", "spatial"])
alignments: st.SearchStrategy[Mode] = st.sampled_from(["dense", "max-length", "longest"])
amounts = st.floats(0.0, 1e12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans as the planner makes them, every field filled."""
    stages = draw(st.integers(1, 4))

    def each(count: int) -> tuple[float, ...]:
        return draw(one_each(amounts, count))

    buckets = draw(groupings(draw(st.lists(task_names, unique=True, max_size=8))))
    return Plan(
        policy="auto",
        stages=stages,
        buckets=tuple(
            Bucket(
                tuple(HybridTask(tuple(tasks)) for tasks in bucket),
                micro_batches=draw(st.integers(1, 8)),
                chunk=draw(st.none() | st.integers(1, 512)),
                chunks=tuple(draw(st.lists(st.integers(1, 8), max_size=4))),
                forward=each(stages),
                backward=each(stages),
                memory=each(stages),
                transfer=each(stages - 1),
            )
            for bucket in buckets
        ),
        tensor=draw(st.integers(1, 8)),
        data=draw(st.integers(1, 8)),
        backbone=draw(st.text(max_size=4)),
        alignment=draw(alignments),
        weights=Weights(draw(amounts), draw(amounts), draw(amounts)),
        costs=draw(st.text(max_size=4)),
        predicted_latency_s=draw(st.none() | amounts),
        memory_bytes=each(stages),
        memory_limit_bytes=draw(st.none() | amounts),
        activation_limit=draw(st.sampled_from([(), each(stages)])),
        replan_in=draw(st.integers(0, 50)),
    )


@settings(deadline=None)
@given(plans())
def test_a_plan_survives_json(plan: Plan) -> None:
    found = Plan.from_json(json.loads(dumps(plan)))
    assert found == plan and dumps(found) == dumps(plan)
    assert json.loads(dumps(plan)) == json.loads(json.dumps(plan.to_json()))


@settings(deadline=None)
@given(policies, accumulations, st.integers(1, 8), st.none() | st.integers(1, 64), alignments)
def test_a_policys_plan_survives_json_and_covers_each_task_once(
    policy: Fixed, accumulation: dict[str, int], stages: int, chunk: int | None, alignment: Mode
) -> None:
    plan = plan_for(policy, accumulation, stages, chunk=chunk, alignment=alignment)
    assert Plan.from_json(json.loads(dumps(plan))) == plan
    expected = list(accumulation)[:1] if policy == "serial" else list(accumulation)
    assert list(plan.tasks) == expected
    assert (plan.policy, plan.stages, plan.alignment) == (policy, stages, alignment)
    for bucket in plan.buckets:
        assert bucket.micro_batches >= max(accumulation[name] for name in bucket.tasks)
        assert bucket.chunk == chunk


def test_spatial_fills_a_pipeline_with_micro_batches() -> None:
    assert plan_for("spatial", {"a": 1, "b": 2}, 2).buckets[0].micro_batches == 4
    assert plan_for("spatial", {"a": 1, "b": 2}, 1).buckets[0].micro_batches == 2
    assert plan_for("spatial", {"a": 1, "b": 2}, 2, micro_batches=3).buckets[0].micro_batches == 3


def test_temporal_gives_each_task_a_bucket() -> None:
    plan = plan_for("temporal", {"a": 1, "b": 2}, 2)
    assert [b.tasks for b in plan.buckets] == [("a",), ("b",)]
    assert "bucket 1: b in 2" in str(plan)
    assert "in 2 micro-batch(es), chunks of 64" in str(plan_for("temporal", {"b": 2}, 1, chunk=64))


Spoil = Callable[[dict[str, Any]], object]


def bucket(**entries: object) -> Spoil:
    return lambda plan: plan["buckets"][1].update(entries)


def hybrid(**entries: object) -> Spoil:
    return lambda plan: plan["buckets"][1]["hybrid_tasks"][0].update(entries)


def plan(**entries: object) -> Spoil:
    return lambda plan: plan.update(entries)


WRONG: list[tuple[Spoil, str, str]] = [
    # what is missing
    (lambda plan: plan.pop("policy"), "policy", "required"),
    (lambda plan: plan["buckets"][1].pop("micro_batches"), "buckets[1].micro_batches", "required"),
    # what nobody knows
    (plan(colour="red"), "colour", "unexpected"),
    (bucket(colour="red"), "buckets[1].colour", "unexpected"),
    (hybrid(colour="red"), "buckets[1].hybrid_tasks[0].colour", "unexpected"),
    (lambda plan: plan["weights"].update(colour="red"), "weights.colour", "unexpected"),
    (plan(policy="greedy"), "policy", "'auto'"),
    (plan(alignment="loose"), "alignment", "'dense'"),
    (plan(format=4), "format", "6"),
    (plan(pointwise="liger"), "pointwise", "'triton'"),
    # what cannot be
    (bucket(forward=[1.0, -0.5]), "buckets[1].forward[1]", "0"),
    (bucket(backward=[math.nan, 1.0]), "buckets[1].backward[0]", "finite"),
    (bucket(transfer=[-1e-9]), "buckets[1].transfer[0]", "0"),
    (bucket(micro_batches=0), "buckets[1].micro_batches", "1"),
    (bucket(chunk=0), "buckets[1].chunk", "1"),
    (bucket(chunks=[2, 0]), "buckets[1].chunks[1]", "1"),
    (hybrid(tasks=[]), "buckets[1].hybrid_tasks[0].tasks", "at least 1"),
    (plan(stages=0), "stages", "1"),
    (plan(replan_in=-1), "replan_in", "0"),
    (plan(predicted_latency_s=math.nan), "predicted_latency_s", ""),
    (plan(activation_limit=[1.0, math.nan]), "activation_limit[1]", "finite"),
    # what is of another type
    (plan(stages="2"), "stages", "integer"),
    (bucket(micro_batches=True), "buckets[1].micro_batches", "integer"),
    (hybrid(tasks="ab"), "buckets[1].hybrid_tasks[0].tasks", "array"),
    (plan(backbone=3), "backbone", "string"),
]


@pytest.mark.parametrize(("spoil", "place", "said"), WRONG, ids=[place for _, place, _ in WRONG])
def test_what_is_not_a_plan_is_refused_by_its_place(spoil: Spoil, place: str, said: str) -> None:
    value = json.loads(dumps(plan_for("temporal", {"a": 1, "b": 2}, 2)))
    Plan.from_json(value)
    spoil(value)
    with pytest.raises(UserError) as caught:
        Plan.from_json(value)
    # Those that hold the wrong entry may be named too.
    named = [problem.split(": ", 1) for problem in caught.value.problems]
    assert place in {where for where, _ in named}
    assert all(place.startswith(where) for where, _ in named)
    assert any(where == place and said in what for where, what in named)


def test_every_wrong_entry_is_told() -> None:
    value = json.loads(dumps(plan_for("temporal", {"a": 1, "b": 2}, 2)))
    value["stages"] = "two"
    value["buckets"][0]["micro_batches"] = 0
    value["buckets"][1]["chunk"] = -1
    with pytest.raises(UserError) as caught:
        Plan.from_json(value)
    places = [problem.split(":")[0] for problem in caught.value.problems]
    assert places == ["stages", "buckets[0].micro_batches", "buckets[1].chunk"]


@pytest.mark.parametrize("value", [[], None, "spatial", 2])
def test_what_is_no_object_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="the plan: must be one JSON object"):
        Plan.from_json(value)
