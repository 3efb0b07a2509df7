"""What holds of every decision, whatever the cluster looks like."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.serve.dispatcher.accounts import CREDIT, Accounts
from megatron_mux.serve.dispatcher.decide import decide, plan
from megatron_mux.serve.dispatcher.decisions import Fail, Launch, Leave, Retire, Start, Wait
from megatron_mux.serve.dispatcher.policies import Fair, Fifo, Policy
from megatron_mux.serve.dispatcher.slots import free_at
from megatron_mux.serve.dispatcher.view import (
    BackboneView,
    Cluster,
    InstanceView,
    JobView,
    SlotView,
    TenantView,
)

NOW = 10_000.0
POLICIES = [Fifo(), Fair(), Fair(patience=1000.0, turn=100.0, least_gain=0.05)]
TENANTS = ["tenant-ada", "tenant-bob", "tenant-eve"]


def job(number: int, tenant: str = "tenant-ada", **fields: object) -> JobView:
    view = JobView(f"job-{number}-id", tenant, number, "a", NOW, NOW, need_bytes=10, seconds_per_step=1.0)
    return replace(view, **{"steps_left": 100.0, **fields})  # type: ignore[arg-type]


def ready(name: str = "0.0", slot: int = 0, **fields: object) -> InstanceView:
    view = InstanceView(name, slot, "a", "ready", 0.0, free_bytes=100)
    return replace(view, **fields)  # type: ignore[arg-type]


def cluster(jobs: list[JobView], *instances: InstanceView, slots: int = 1, **fields: object) -> Cluster:
    view = Cluster(jobs, instances, [], [SlotView(number) for number in range(slots)], [BackboneView("a")])
    return replace(view, **fields)  # type: ignore[arg-type]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    number = st.integers
    instances: list[InstanceView] = []
    for slot in range(draw(number(0, 3))):
        idle = draw(st.sampled_from([None, 0.0, NOW - 5]))
        state: Literal["ready", "starting", "draining"]
        state = draw(st.sampled_from(["ready", "ready", "starting", "draining"]))
        free = draw(st.one_of(st.none(), number(0, 60)))
        started = draw(st.sampled_from([0.0, NOW - 10]))
        backbone = draw(st.sampled_from("ab"))
        instances.append(InstanceView(f"{slot}.0", slot, backbone, state, started, free, idle))
    jobs = []
    for index in range(draw(number(0, 14))):
        at = draw(st.sampled_from([None, None, *instances]))
        jobs.append(
            JobView(
                f"job-{index}-id",
                draw(st.sampled_from(TENANTS)),
                index,
                at.backbone if at else draw(st.sampled_from("abc")),
                NOW - 5000 + index,
                NOW - draw(st.sampled_from([0.0, 700.0, 1900.0, 4000.0])),
                draw(number(-2, 2)),
                draw(st.sampled_from([None, NOW - 1, NOW + 150])),
                draw(st.sampled_from(["run", "run", "run", "pause", "cancel"])),
                at.name if at else None,
                bool(at) and draw(st.booleans()),
                draw(st.booleans()),
                draw(st.one_of(st.none(), number(0, 40))),
                draw(st.sampled_from([None, 0.5, 2.0])),
                draw(st.sampled_from([None, 1.0, 50.0])),
                draw(st.sampled_from([0, 0, 0, 1, 2, 5, 8])),
                draw(st.sampled_from([0, 0, 1, 2])),
            )
        )
    for index, instance in enumerate(instances):
        refused = {one.id: "words of the instance" for one in jobs if draw(number(0, 4)) == 0}
        instances[index] = replace(instance, refusals=refused)
    tenants = [
        TenantView(
            name, draw(st.sampled_from([1.0, 3.0])), draw(st.sampled_from([None, 2])), draw(number(0, 100))
        )
        for name in TENANTS[:2]
    ]
    slots = [SlotView(slot, draw(number(0, 3)), NOW - draw(number(0, 3))) for slot in range(4)]
    capacity = draw(st.sampled_from([None, 30]))
    return Cluster(jobs, instances, tenants, slots, [BackboneView("a", capacity), BackboneView("b")])


@settings(max_examples=150, deadline=None)
@given(clusters(), st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_each_decision_is_possible(now: Cluster, policy: Policy, order: random.Random) -> None:
    made = plan(now, policy, NOW)
    jobs = {one.id: one for one in now.jobs}
    instances = {one.name: one for one in now.instances}
    answered = Counter(each.job for each in made.decisions if isinstance(each, Start | Wait | Fail))
    waiting = {one.id for one in now.jobs if one.wants == "run" and one.instance is None}
    assert answered == Counter(dict.fromkeys(waiting, 1))

    free = {
        one.name: (float("inf") if one.free_bytes is None else one.free_bytes)
        - sum(each.bytes for each in now.jobs if each.instance == one.name and not each.admitted)
        for one in now.instances
    }
    retired = {each.instance for each in made.decisions if isinstance(each, Retire)}
    running = Counter(one.tenant for one in now.jobs if one.instance is not None)
    for each in made.decisions:
        if isinstance(each, Start):
            started, instance = jobs[each.job], instances[each.instance]
            assert instance.state == "ready" and instance.backbone == started.backbone
            assert each.job not in instance.refusals and each.instance not in retired
            free[each.instance] -= started.bytes
            assert free[each.instance] >= 0 or not started.bytes
            running[started.tenant] += 1
            limit = next((one.running_limit for one in now.tenants if one.id == started.tenant), None)
            assert limit is None or running[started.tenant] <= limit
            others = [one for one in now.jobs if one.instance == each.instance]
            others += [jobs[one.job] for one in made.decisions if isinstance(one, Start) and one is not each
                       and one.instance == each.instance]  # fmt: skip
            suspects = [one for one in others if one.suspects]
            assert started.suspects or not suspects
            assert not 0 < started.suspects <= 3 or not others
            assert not started.suspects or len(suspects) < max(1, started.suspects // 2)
        if isinstance(each, Leave):
            assert jobs[each.job].instance == each.instance and not jobs[each.job].leaving
        if isinstance(each, Retire):
            assert instances[each.instance].state == "ready"
            assert NOW - instances[each.instance].started_at >= policy.hold
        for name in (*TENANTS, *jobs):
            assert name not in each.reason
    launched = [each.slot for each in made.decisions if isinstance(each, Launch)]
    assert len(launched) == len(set(launched)) and not set(launched) & {one.slot for one in now.instances}
    assert all(free_at(slot) <= NOW for slot in now.slots if slot.number in launched)

    def shuffled(values: object) -> list[object]:
        return order.sample(list(values), len(list(values)))  # type: ignore[call-overload]

    fields = ("jobs", "instances", "tenants", "slots", "backbones")
    again = replace(now, **{name: shuffled(getattr(now, name)) for name in fields})  # type: ignore[arg-type]
    assert plan(again, policy, NOW) == made


def test_first_come_first_served_fills_up_without_delaying_the_first() -> None:
    running = job(0, instance="0.0", need_bytes=60, steps_left=100.0)
    large, small = job(1, need_bytes=70), job(2, need_bytes=10, steps_left=2.0)
    long = job(3, need_bytes=35, steps_left=500.0)  # would still be there when the large one could start
    made = decide(cluster([running, large, small, long], ready(free_bytes=40)), Fifo(), NOW)
    assert [each.job for each in made if isinstance(each, Start)] == [small.id]
    first, second = (each for each in made if isinstance(each, Wait))
    assert first.job == large.id and first.predicted_start == pytest.approx(NOW + 101.2, abs=0.1)
    assert "0.00 GiB" in first.reason and (first.before, second.before) == (0, 1)
    aged = replace(large, since=NOW - 4000)
    made = decide(cluster([running, aged, small], ready(free_bytes=40)), Fifo(), NOW)
    assert not [each for each in made if isinstance(each, Start)]


def test_a_tenant_orders_its_jobs_by_priority_deadline_and_arrival() -> None:
    jobs = [job(0), job(1, priority=1), job(2, deadline=NOW + 200), job(3, deadline=NOW + 5000)]
    jobs += [job(4, deadline=NOW + 50), job(5, priority=1, submitted_at=NOW + 3700)]
    made = decide(cluster(jobs, ready(free_bytes=0)), Fair(), NOW)
    order = [each.job.split("-")[1] for each in made if isinstance(each, Wait)]
    assert order == ["2", "1", "0", "3", "4", "5"]  # 3 is in no hurry, and 4 too late


def test_the_tenant_that_was_given_least_is_next_by_weight() -> None:
    jobs = [job(number, TENANTS[number % 2], need_bytes=50) for number in range(4)]
    tenants = [TenantView(TENANTS[0], 2.0, served=1000.0), TenantView(TENANTS[1], served=700.0)]
    made = decide(cluster(jobs, ready(), tenants=tenants), Fair(), NOW)
    assert [each.job for each in made if isinstance(each, Start)] == ["job-0-id", "job-2-id"]
    lagging = replace(tenants[0], served=1000.0, weight=1.0)
    made = decide(cluster(jobs, ready(), tenants=[lagging, tenants[1]]), Fair(), NOW)
    assert [each.job for each in made if isinstance(each, Start)] == ["job-1-id", "job-3-id"]


def test_jobs_spread_over_instances_and_wait_for_one_that_starts_if_that_is_sooner() -> None:
    starting = ready("1.0", 1, state="starting", started_at=NOW - 20, free_bytes=None)
    running = job(0, instance="0.0")
    long, short = job(1, steps_left=1000.0), job(2, steps_left=5.0)
    made = decide(cluster([running, long, short], ready(), starting, slots=2), Fair(), NOW)
    assert [each.job for each in made if isinstance(each, Start)] == [short.id]
    waits = [each for each in made if isinstance(each, Wait)]
    assert [(each.job, each.predicted_start) for each in waits] == [(long.id, NOW + 10)]
    made = decide(
        cluster([job(number) for number in range(8)], ready(), ready("1.0", 1), slots=2), Fair(), NOW
    )
    assert Counter(each.instance for each in made if isinstance(each, Start)) == {"0.0": 4, "1.0": 4}


def test_a_tenant_that_has_everything_makes_room_once_others_have_waited() -> None:
    flood = [job(number, instance="0.0", need_bytes=25, since=NOW - 2000 + number) for number in range(4)]
    other = job(9, TENANTS[1], need_bytes=50, since=NOW - 3600)
    made = decide(cluster([*flood, other], ready(free_bytes=0)), Fair(), NOW)
    assert [each.job for each in made if isinstance(each, Leave)] == ["job-3-id", "job-2-id"]
    leaving = [replace(each, leaving=each.number > 1) for each in flood]
    made = decide(cluster([*leaving, other], ready(free_bytes=0)), Fair(), NOW)
    assert [type(each) for each in made] == [Wait]
    young = [replace(each, since=NOW - 100) for each in flood]
    assert not [each for each in decide(cluster([*young, other], ready(free_bytes=0)), Fair(), NOW)
                if isinstance(each, Leave)]  # fmt: skip


def test_what_cannot_run_fails_with_the_reason() -> None:
    refused = ready(refusals={"job-0-id": "needs 3 GiB, there are 2"})
    (made,) = decide(cluster([job(0)], refused), Fair(), NOW)
    assert isinstance(made, Fail) and "needs 3 GiB" in made.reason
    (made,) = decide(cluster([job(0), job(1, instance="0.0")], refused), Fair(), NOW)
    assert isinstance(made, Wait)
    known = [BackboneView("a", capacity_bytes=9)]
    (made,) = decide(cluster([job(0)], slots=0, backbones=known), Fair(), NOW)
    assert isinstance(made, Fail)
    (made,) = decide(cluster([job(0, suspects=1, lone_deaths=2)], ready()), Fair(), NOW)
    assert isinstance(made, Fail)


def test_slots_are_launched_again_later_and_later() -> None:
    assert [free_at(SlotView(0, deaths, 5.0)) for deaths in range(1, 9)] == [6, 7, 9, 13, 21, 37, 65, 65]
    dead = cluster([job(0)], slots=0)
    (wait,) = decide(replace(dead, slots=[SlotView(0, 4, NOW - 3)]), Fair(), NOW)
    assert isinstance(wait, Wait) and "again 8 s later" in wait.reason and wait.predicted_start == NOW + 35
    made = decide(replace(dead, slots=[SlotView(0, 4, NOW - 8)]), Fair(), NOW)
    assert [type(each) for each in made] == [Launch, Wait]


def test_an_idle_instance_gives_its_slot_to_another_backbone_and_chats_keep_one() -> None:
    idle = ready(backbone="b", idle_since=NOW - 100)
    both = [BackboneView("a"), BackboneView("b")]
    made = decide(cluster([job(0)], idle, backbones=both), Fair(), NOW)
    assert [type(each) for each in made] == [Retire, Wait]
    kept = [BackboneView("a"), BackboneView("b", wanted=True)]
    assert [type(each) for each in decide(cluster([job(0)], idle, backbones=kept), Fair(), NOW)] == [Wait]
    assert [type(each) for each in decide(cluster([], backbones=kept), Fair(), NOW)] == [Launch]
    other = ready(backbone="a", idle_since=NOW - 100)
    assert [type(each) for each in decide(cluster([], other, backbones=kept), Fair(), NOW)] == [Retire]
    used = [job(0, instance="0.0")]
    assert decide(cluster(used, ready(backbone="a"), backbones=kept), Fair(), NOW) == []


def test_accounts_give_no_credit_for_having_wanted_nothing() -> None:
    accounts = Accounts()
    accounts.served({"a": 1.0, "b": 2.0})
    accounts.charge("a", 500.0)
    accounts.charge("b", 1000.0 + 3 * CREDIT)
    assert accounts.served({"a": 1.0, "b": 2.0, "new": 1.0}) == {
        "a": 500 + CREDIT / 2, "b": 1000 + 3 * CREDIT, "new": 500.0,
    }  # fmt: skip


@pytest.mark.parametrize("policy", [Fifo(), Fair()])
def test_decisions_are_quick(policy: Policy) -> None:
    draw = random.Random(0)
    jobs = [
        job(
            number,
            TENANTS[number % 3],
            instance=f"{number % 8}.0" if number < 48 else None,
            need_bytes=draw.randint(5, 40),
            steps_left=float(draw.randint(2, 500)),
        )
        for number in range(300)
    ]
    view = cluster(jobs, *(ready(f"{slot}.0", slot, free_bytes=4) for slot in range(8)), slots=8)
    begun = time.process_time()
    plan(view, policy, NOW)
    assert time.process_time() - begun < 0.25  # some 0.03 s on a quiet core


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-4, 2.0), st.floats(0.0, 100.0)), min_size=1, max_size=6),
    st.sampled_from([NOW, 1_796_000_000.123]),
)
def test_forecasts_come_to_an_end_however_short_steps_are_beside_the_clock(
    steps: list[tuple[float, float]], now: float
) -> None:
    jobs = [
        job(number, seconds_per_step=seconds, steps_left=left, instance="0.0", submitted_at=now, since=now)
        for number, (seconds, left) in enumerate(steps)
    ]
    found = plan(cluster(jobs, ready()), Fair(), now).forecasts
    alone = max(seconds * left for seconds, left in steps)
    assert now + alone - 1e-3 <= max(own.end or 0.0 for own in found.values())
