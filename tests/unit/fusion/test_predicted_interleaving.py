"""Pieces and messages of planned passes: those of the launch order, in the time that the schedule gives the pass."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_mux.fusion.graphs.launch_order import decode
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.predicted_interleaving import with_interleaving
from megatron_mux.fusion.step import bucket_costs, step_template
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.simulate import simulate
from tests.unit.fusion.test_interleave import planned, slowness


def scheduled(plan: Plan) -> list[TimedAction]:
    sizes = [bucket.chunks for bucket in plan.buckets]
    found = simulate(step_template(plan, sizes), [bucket_costs(bucket) for bucket in plan.buckets])
    return [timed for stage in found.timed for timed in stage]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_parts_of_a_pass_are_those_of_its_launch_order(stages: int) -> None:
    plan = planned("kahn", stages, slower=slowness(1 / 2))
    found = with_interleaving(scheduled(plan), plan)
    passes = [timed for timed in found if timed.parts]
    assert {timed.action.stage for timed in passes} == set(range(stages))
    for timed in passes:
        bucket = plan.buckets[timed.action.bucket]
        launch = bucket.launch[timed.action.stage]
        order = decode(launch.backward if timed.action.is_backward else launch.forward)
        messages = {batch: count - 1 for batch, count in Counter(order).items()}
        pieces = [part for part in timed.parts if not part.message]
        sent = [part for part in timed.parts if part.message]
        # Behind a pass's last message nothing is predicted to be computed.
        assert Counter(part.batch for part in pieces) == Counter(part.batch for part in sent) == messages
        for lane in (pieces, sent):
            for one, after in zip(lane, lane[1:], strict=False):
                assert one.stop <= after.start + 1e-12
        turns = bucket.turns[timed.action.stage]
        costs = turns.backward if timed.action.is_backward else turns.forward
        first, last = min(part.start for part in pieces), max(part.stop for part in timed.parts)
        assert timed.start <= first and last <= timed.stop + 1e-12
        outside = timed.stop - timed.start - (last - first)  # all micro-batches are alike
        assert outside == pytest.approx(sum(own.outside for own in costs), rel=0.05, abs=1e-9)
        assert {part.label for part in pieces} == {"+".join(own.tasks) for own in bucket.hybrid_tasks}


def test_the_costs_of_its_hybrid_tasks_are_those_of_the_bucket() -> None:
    """What lanes are drawn from and what the bucket is priced at agree, but for the mean over micro-batches."""
    plan = planned("halves", slower=slowness(1 / 2))
    for bucket in plan.buckets:
        (turns,) = bucket.turns
        assert len(turns.forward) == len(turns.backward) == bucket.batches == 2
        for passes, whole in ((turns.forward, bucket.forward), (turns.backward, bucket.backward)):
            computation = sum(own.compute + own.outside for own in passes)
            messages = sum(own.messages for own in passes)
            assert max(computation, messages) <= whole[0] * 1.05 and whole[0] < computation + messages


def test_without_launch_orders_nothing_is_added() -> None:
    plan = planned("off", slower=slowness(1 / 2))
    actions = scheduled(plan)
    assert with_interleaving(actions, plan) == actions
