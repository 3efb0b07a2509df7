"""Steps without a flush between them: complete, in order, free of deadlock, and worth it."""

from __future__ import annotations

from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.check import TemplateError, check
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.structured import structured
from megatron_mux.pipeline.template import Template, one_f_one_b, with_updates
from tests.unit.pipeline.idle import bubble_shares

seconds = st.floats(0.1, 10.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[BucketCost], list[list[int]]]:
    """Buckets, and several steps of them: cut anyhow, some without a micro-batch on this pipeline."""
    stages, period, count = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    buckets = [
        BucketCost(
            micro_batches=3,
            forward=tuple(draw(st.lists(seconds, min_size=stages, max_size=stages))),
            backward=tuple(draw(st.lists(seconds, min_size=stages, max_size=stages))),
            transfer=(draw(st.floats(0.0, 2.0)),) * (stages - 1),
            update=(draw(st.floats(0.0, 1.0)),) * stages,
        )
        for _ in range(period)
    ]
    sizes = [draw(st.lists(st.integers(1, 3), max_size=4)) for _ in range(period * count)]
    return buckets, sizes


def rolled(buckets: list[BucketCost], sizes: list[list[int]]) -> tuple[Template, Template]:
    """The structured template and 1F1B."""
    period, stages = len(buckets), buckets[0].stages
    return (
        with_updates(structured(buckets, None, sizes), sizes, period),
        with_updates(one_f_one_b(stages, sizes, period), sizes, period),
    )


@settings(max_examples=100, deadline=None)
@given(steps())
def test_steps_follow_each_other_in_order(case: tuple[list[BucketCost], list[list[int]]]) -> None:
    buckets, sizes = case
    period = len(buckets)
    for template in rolled(buckets, sizes):
        found = simulate(template, buckets, sizes=sizes)  # refuses what is incomplete or stuck
        done = {timed.action: timed for actions in found.timed for timed in actions}
        for action, timed in done.items():
            if action.kind == "N" and action.stage:
                assert timed.start <= done[Action(action.stage - 1, "N", action.bucket)].start
            if action.kind == "U":
                assert timed.start >= done[Action(0, "N", action.bucket)].stop - 1e-9
            if action.kind == "F" and action.bucket >= period:
                assert timed.start >= done[Action(action.stage, "U", action.bucket - period)].stop - 1e-9


@settings(max_examples=100, deadline=None)
@given(steps(), st.data())
def test_a_step_out_of_order_is_refused(
    case: tuple[list[BucketCost], list[list[int]]], data: st.DataObject
) -> None:
    buckets, sizes = case
    template = [list(actions) for actions in rolled(buckets, sizes)[0]]
    rank = data.draw(st.integers(0, len(template) - 1))
    ends = [i for i, action in enumerate(template[rank]) if not action.is_pass]
    i = data.draw(st.sampled_from(ends))
    edit = data.draw(st.sampled_from(["drop", "first", "twice"]))
    moved = template[rank].pop(i)
    if edit == "first":
        if i == 0:
            return  # it is where it was
        template[rank].insert(0, moved)
        if moved.kind == "N" and moved.bucket == 0 and not sizes[0]:
            return  # a bucket without a micro-batch may end at once
    elif edit == "twice":
        template[rank][i:i] = [moved, moved]
    with pytest.raises(TemplateError):
        check(tuple(tuple(actions) for actions in template), sizes, len(template), len(buckets))


def test_the_known_order_of_two_buckets() -> None:
    buckets = [BucketCost(1, (1.0, 1.0), (1.0, 1.0))] * 2
    template = with_updates(structured(buckets, None, [[1]] * 4), [[1]] * 4, 2)
    assert [" ".join(map(str, actions)) for actions in template] == [
        "0F0.0 0F1.0 0B0.0 0N0 0U0 0F2.0 0B1.0 0N1 0U1 0F3.0 0B2.0 0N2 0B3.0 0N3 0U2 0U3",
        "1F0.0 1B0.0 1N0 1F1.0 1B1.0 1N1 1U0 1F2.0 1B2.0 1N2 1U1 1F3.0 1B3.0 1N3 1U2 1U3",
    ]


@pytest.mark.parametrize("stages", [2, 4])
def test_a_flush_costs_what_the_closed_form_says_and_rolling_nothing(stages: int) -> None:
    buckets = [BucketCost(4, (1.0,) * stages, (1.0,) * stages)] * 4
    for count in (1, 4, 16):
        sizes = [[1] * 4] * 4 * count
        found = simulate(rolled(buckets, sizes)[0], buckets, sizes=sizes)
        work = 16 * count
        for stage in range(stages):
            # One fill and one drain for all steps together.
            assert bubble_shares(found)[stage] == pytest.approx((stages - 1) / (work + stages - 1))


def test_one_bucket_alone_waits_for_its_own_step() -> None:
    buckets = [BucketCost(2, (1.0, 1.0), (1.0, 1.0))]
    sizes = [[1, 1]] * 3
    alone = simulate(rolled(buckets, sizes[:1])[0], buckets, sizes=sizes[:1]).latency
    assert simulate(rolled(buckets, sizes)[0], buckets, sizes=sizes).latency == pytest.approx(3 * alone)


@pytest.mark.parametrize(
    ("stages", "idle", "idle_1f1b"), [([1.0, 1.0], 0.04, 0.06), ([1.03, 1.0], 0.06, 0.08)]
)
def test_a_lead_makes_up_for_passes_that_take_longer_than_usual(
    stages: list[float], idle: float, idle_1f1b: float
) -> None:
    buckets = [BucketCost(8, tuple(stages), tuple(stages))] * 2
    sizes = [[1] * 8] * 12
    found = []
    for template in rolled(buckets, sizes):
        runs = [
            simulate(template, buckets, sizes=sizes, vary=lambda action, seed=seed: _slower(action, seed))  # type: ignore[misc]
            for seed in range(5)
        ]
        found.append(mean(max(bubble_shares(run)) for run in runs))
    assert found[0] < idle < idle_1f1b < found[1]


def _slower(action: Action, seed: int) -> float:
    """How much longer an action takes than predicted; the same for the same seed."""
    return Random(f"{seed} {action}").lognormvariate(0.0, 0.2)
