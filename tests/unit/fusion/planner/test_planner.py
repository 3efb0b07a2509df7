"""Plans cover each task once, keep to memory, are the same every time, and are never predicted to be slower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.fusion.check import check_plan
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan, dumps
from megatron_mux.fusion.planner.load import TaskLoad, signature_of
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.step import Lengths, step_chunks
from megatron_mux.kernels.attention.short import LONGEST
from megatron_mux.tasks import TaskSpec
from tests.unit.fusion import backbone

meshes = st.builds(Mesh, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))


def planner(mesh: Mesh, **changes: object) -> Planner:
    profile = backbone.profile(tensor_parallel=mesh.tensor)
    return Planner(PlanningContext(profile, backbone.info(), mesh, tables=backbone.MadeUpTables(), **changes))  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), meshes)
@example(200, Mesh(data=2))  # one pipeline has no record
def test_a_plan_is_whole_deterministic_and_runnable(seed: int, mesh: Mesh) -> None:
    loads = backbone.random_loads(seed)
    plan = planner(mesh).plan(loads)
    assert sorted(plan.tasks) == sorted(loads)
    assert plan == planner(mesh).plan(dict(reversed(loads.items()))), "whatever the order of tasks"
    assert Plan.from_json(json.loads(dumps(plan))) == plan
    check_plan(plan, backbone.info().fingerprint, mesh, sorted(loads))
    assert plan.predicted_latency_s is not None
    comparison = planner(mesh).compare(loads)
    for name in ("serial", "spatial", "temporal"):
        other = comparison.alternatives[name]
        assert other is not None and plan.predicted_latency_s <= other * (1 + 1e-9), name
    lengths = {
        name: Lengths(tuple(map(int, load.tokens)), tuple(map(int, load.labels)))
        for name, load in loads.items()
    }
    all_chunked = [step_chunks(plan, lengths, rank) for rank in range(mesh.data)]
    rows = sum(
        s.tokens
        for chunked in all_chunked
        for chunks in chunked.chunks.values()
        for chunk in chunks
        for s in chunk
    )
    tokens = sum(sum(own.tokens) for own in lengths.values())
    padding = comparison.padding
    assert padding["plan"] == 1 - tokens / rows, "what the steps of the plan really hold"
    assert padding["plan"] <= padding["within_tasks"] <= padding["zero_padded"]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([1, 2, 4]), st.floats(0.02, 1.5))
def test_a_plan_keeps_to_memory_or_says_who_does_not_fit(seed: int, stages: int, share: float) -> None:
    loads, mesh = backbone.random_loads(seed), Mesh(pipeline=stages)
    free = planner(mesh).plan(loads)
    limit = share * max(free.memory_bytes)
    try:
        plan = planner(mesh, memory_limit=limit).plan(loads)
    except UserError as error:
        for problem in error.problems:
            assert "give more memory" in problem
            assert "the memory limit of" in problem or any(repr(name) in problem for name in loads)
        with pytest.raises(UserError):
            planner(mesh, memory_limit=limit).check(loads)
        return
    assert max(plan.memory_bytes) <= limit * (1 + 1e-9)
    planner(mesh, memory_limit=limit).check(loads)


def test_what_would_make_a_task_fit_makes_it_fit() -> None:
    loads = {"long": backbone.load("long", [512]), "short": backbone.load("short", [16])}
    mesh = Mesh()
    limit = planner(mesh).plan({**loads, "long": backbone.load("long", [300])}).memory_bytes[0]
    with pytest.raises(UserError, match="task 'long': one sequence of 512 tokens needs") as told:
        planner(mesh, memory_limit=limit).plan(loads)
    (problem,) = told.value.problems
    length = int(problem.partition("max_length to ")[2].partition(",")[0])
    assert 300 <= length < 512
    planner(mesh, memory_limit=limit).plan({**loads, "long": backbone.load("long", [length])})


def test_users_count_on_accumulation() -> None:
    loads = {"a": backbone.load("a", [64] * 8, accumulation=4), "b": backbone.load("b", [64] * 8)}
    plan = planner(Mesh()).plan(loads)
    assert all(bucket.micro_batches >= 4 for bucket in plan.buckets if "a" in bucket.tasks)


def test_numbers_that_are_given_are_kept() -> None:
    loads = backbone.random_loads(3)
    plan = planner(Mesh(pipeline=2), micro_batches=3, chunk=32).plan(loads)
    assert {(bucket.micro_batches, bucket.chunk) for bucket in plan.buckets} == {(3, 32)}


def test_padding_is_planned_for() -> None:
    loads = {"a": backbone.load("a", [10, 20, 64]), "b": backbone.load("b", [128])}
    made = planner(Mesh(), alignment="longest")
    comparison = made.compare(loads)
    assert comparison.padding["plan"] == pytest.approx(1 - 222 / 512)
    assert made.plan(loads).predicted_latency_s == pytest.approx(comparison.alternatives["padded"])


def test_a_pipeline_cuts_what_is_long() -> None:
    loads = {"a": backbone.load("a", [2048, 2048])}
    plan = planner(Mesh(pipeline=4)).plan(loads)
    assert plan.buckets[0].chunk is not None and max(plan.buckets[0].chunks) > 1


def test_other_tasks_are_checked_while_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, in the middle of the plan without interleaving: each plan is of its own tasks."""
    made = planner(Mesh(2), memory_limit=1e12, interleave="auto")
    checked = 0
    first, second = ({name: backbone.load(name, [64] * 4) for name in names} for names in ("ab", "cd"))
    whole = Planner.plan

    def plan(self: Planner, tasks: Mapping[str, TaskLoad]) -> Plan:
        nonlocal checked
        found = whole(self, tasks)
        if self.context.interleave == "off" and "a" in tasks:
            made.check(second)
            checked += 1
        return found

    monkeypatch.setattr(Planner, "plan", plan)
    assert sorted(made.plan(first).tasks) == sorted(first)
    assert sorted(made.plan(second).tasks) == sorted(second)
    assert made.plan(second) == planner(Mesh(2), memory_limit=1e12, interleave="auto").plan(second)
    assert checked == 1


def test_no_task_no_bucket() -> None:
    assert planner(Mesh()).plan({}).buckets == ()


class Asked(backbone.MadeUpTables):
    """Tables that note what they are asked to prepare."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[object] = []

    def prepare(self, *asked: object) -> None:
        """See `MemorySource`."""
        self.prepared.append(asked)


@pytest.mark.parametrize(("longest", "short"), [(LONGEST, True), (LONGEST + 1, False)])
def test_memory_is_prepared_for_all_that_may_meet(longest: int, short: bool) -> None:
    tables, loads, mesh = Asked(), backbone.random_loads(1, 3), Mesh(pipeline=2)
    context = PlanningContext(backbone.profile(), backbone.info(), mesh, recompute="full")
    coming = TaskSpec.model_validate(
        {
            "name": "coming",
            "adapter": {"peft_type": "BOTTLENECK", "bottleneck_size": 5},
            "data": {"path": "none", "max_length": longest},
            "training": {"max_steps": 3},
        }
    )
    unlimited = Planner(replace(context, tables=tables))
    assert unlimited.prepare(loads, [coming]) is None and not tables.prepared
    Planner(replace(context, tables=tables, memory_limit=1e9)).prepare(loads, [coming])
    of_loads = {load.signature(backbone.shape()) for load in loads.values()}
    every = sorted(of_loads | {signature_of(coming, backbone.shape())})
    assert tables.prepared == [(mesh, "full", every, short)] and len(every) == len(of_loads) + 1
