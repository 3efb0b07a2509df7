"""Plans that hide messages of tensor ranks: launch orders, halves, and how much they are predicted to gain."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import cache

import pytest

from megatron_mux.errors import UserError
from megatron_mux.fusion.check import check_plan
from megatron_mux.fusion.graphs.launch_order import Interleave, LayerCost, PieceCost, decode
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan, dumps, keep_tasks
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.step import Lengths, step_chunks
from tests.unit.fusion import backbone

LAYERS = 8
LOADS = {name: backbone.load(name, [128] * 8) for name in "abcd"}
FINGERPRINT = backbone.info(LAYERS).fingerprint


@cache
def planned(
    interleave: Interleave, stages: int = 1, slower: float = 1.0, sequence_parallel: bool = False
) -> Plan:
    """The plan at TP=2, over a link so many times as slow as the roofline's."""
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    curve = profile.curves["all_reduce"]
    slow = dataclasses.replace(
        curve,
        forward=tuple(slower * s for s in curve.forward),
        backward=tuple(slower * s for s in curve.backward),
    )
    profile = dataclasses.replace(profile, curves={**profile.curves, "all_reduce": slow})
    mesh = Mesh(2, stages)
    context = PlanningContext(
        profile, backbone.info(LAYERS), mesh, interleave=interleave, sequence_parallel=sequence_parallel
    )
    plan = Planner(context).plan(LOADS)
    check_plan(plan, FINGERPRINT, mesh, sorted(LOADS))
    assert Plan.from_json(json.loads(dumps(plan))) == plan
    return plan


def seconds(plan: Plan) -> float:
    assert plan.predicted_latency_s is not None
    return plan.predicted_latency_s


def share_of_messages(slower: float) -> float:
    """Part of a step that a slower link takes, one hybrid task after another."""
    free, bound = planned("off", slower=1e-6), planned("off", slower=slower)
    return 1 - seconds(free) / seconds(bound)


@cache
def slowness(share: float) -> float:
    """How much slower a link has to be for its messages to take this part of a step."""
    low, high = 1e-3, 1e5
    for _ in range(40):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if share_of_messages(middle) < share else (low, middle)
    return high


@pytest.mark.parametrize("interleave", ["kahn", "halves", "auto"])
@pytest.mark.parametrize(("share", "gain"), [(1 / 3, 1.15), (1 / 2, 1.3)])
def test_hidden_messages_are_worth_it(interleave: Interleave, share: float, gain: float) -> None:
    slower = slowness(share)
    plan, off = planned(interleave, slower=slower), planned("off", slower=slower)
    assert not any(bucket.launch for bucket in off.buckets)
    assert any(bucket.launch for bucket in plan.buckets)
    assert seconds(off) / seconds(plan) >= gain
    assert seconds(off) / seconds(plan) <= 1 / max(1 - share, share), "what cannot be hidden is not free"
    if interleave == "auto":
        others = [planned(other, slower=slower) for other in ("off", "kahn", "halves")]
        assert seconds(plan) <= min(map(seconds, others)) * 1.06, (
            "but for what another layout has to be worth"
        )


def test_what_is_gained_is_reported() -> None:
    context = PlanningContext(
        backbone.profile(LAYERS, tensor_parallel=2), backbone.info(LAYERS), Mesh(2, 2), interleave="auto"
    )
    alternatives = Planner(context).compare(LOADS).alternatives
    assert alternatives["interleave_off"] == seconds(planned("off", stages=2))
    off = Planner(dataclasses.replace(context, interleave="off")).compare(LOADS)
    assert "interleave_off" not in off.alternatives, "nothing to compare with"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_launch_orders_have_the_pieces_of_the_stages(stages: int, sequence_parallel: bool) -> None:
    plan = planned("auto", stages, slower=slowness(1 / 2), sequence_parallel=sequence_parallel)
    messages = (4 if sequence_parallel else 2) * LAYERS // stages
    launched = [bucket for bucket in plan.buckets if bucket.launch]
    assert launched
    for bucket in launched:
        assert len(bucket.launch) == stages
        for order in bucket.launch:
            for text in (order.forward, order.backward):
                assert Counter(decode(text)) == dict.fromkeys(range(bucket.batches), messages + 1)


def test_halves_have_all_sequences_and_nearly_equal_cost() -> None:
    plan = planned("halves", slower=slowness(1 / 2))
    lengths = {n: Lengths(tuple(map(int, o.tokens)), tuple(map(int, o.labels))) for n, o in LOADS.items()}
    assert all(bucket.halves for bucket in plan.buckets)
    found = Counter[tuple[str, int]]()
    for chunks in step_chunks(plan, lengths).chunks.values():
        assert len(chunks) == 2
        first, second = (sum(piece.tokens for piece in chunk) for chunk in chunks)
        assert abs(first - second) <= 128
        found.update((piece.task, piece.sequence) for chunk in chunks for piece in chunk)
    assert found == Counter((name, i) for name, own in LOADS.items() for i in range(len(own.tokens)))


def test_without_one_of_its_hybrid_tasks_a_bucket_has_no_launch_order() -> None:
    plan = planned("kahn", slower=slowness(1 / 2))
    bucket = next(bucket for bucket in plan.buckets if bucket.launch)
    left = keep_tasks(plan, [name for name in plan.tasks if name not in bucket.hybrid_tasks[0].tasks])
    assert not any(own.launch for own in left.buckets if set(own.tasks) < set(bucket.tasks))


@pytest.mark.parametrize("order", ["", "0", "001", "012012", "0 1"])
def test_a_launch_order_edited_by_hand_is_refused(order: str) -> None:
    plan = planned("kahn", slower=slowness(1 / 2))
    index = next(i for i, bucket in enumerate(plan.buckets) if bucket.launch)
    launch = (dataclasses.replace(plan.buckets[index].launch[0], forward=order),)
    buckets = list(plan.buckets)
    buckets[index] = dataclasses.replace(buckets[index], launch=launch)
    edited = dataclasses.replace(plan, buckets=tuple(buckets))
    with pytest.raises(UserError, match=rf"buckets\[{index}\].launch\[0\].forward"):
        check_plan(Plan.from_json(json.loads(dumps(edited))), FINGERPRINT, Mesh(2), sorted(LOADS))


def test_predictions_for_other_pieces_are_refused() -> None:
    plan = planned("kahn", stages=2, slower=slowness(1 / 2))
    index, bucket = next((i, own) for i, own in enumerate(plan.buckets) if own.launch)
    first = bucket.turns[0]
    passes = (
        dataclasses.replace(first.forward[0], kinds=(LayerCost((PieceCost(1.0, 1.0),) * 4),)),
        *first.forward[1:],
    )
    turns, fewer = (
        (dataclasses.replace(first, forward=own), *bucket.turns[1:]) for own in (passes, first.forward[1:])
    )
    for changed, said in (
        ({"turns": turns}, rf"buckets\[{index}\].turns\[0\].forward"),
        ({"turns": fewer}, rf"buckets\[{index}\].turns\[0\].forward: has"),
        ({"launch": bucket.launch[:1]}, rf"buckets\[{index}\].launch"),
    ):
        own = dataclasses.replace(bucket, **changed)
        edited = dataclasses.replace(plan, buckets=(*plan.buckets[:index], own, *plan.buckets[index + 1 :]))
        with pytest.raises(UserError, match=said):
            check_plan(edited, FINGERPRINT, Mesh(2, 2), sorted(LOADS))
    value = json.loads(dumps(plan))
    value["buckets"][index]["turns"][0]["forward"][0]["compute"] = -5
    with pytest.raises(UserError, match="compute"):
        Plan.from_json(value)


@pytest.mark.parametrize(("tasks", "stages"), [(6, 1), (24, 4)])
def test_auto_is_never_predicted_to_be_slower_than_off(tasks: int, stages: int) -> None:
    loads = backbone.random_loads(0, tasks, LAYERS)
    profile = backbone.profile(LAYERS, tensor_parallel=2)
    context = PlanningContext(profile, backbone.info(LAYERS), Mesh(2, stages), rolling=8)
    off, auto = (Planner(dataclasses.replace(context, interleave=own)).plan(loads) for own in ("off", "auto"))
    assert seconds(auto) <= seconds(off) * (1 + 1e-9)
