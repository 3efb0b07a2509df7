"""Policies in simulated time: nobody waits for ever, tenants get their shares, bad jobs are found."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.serve.dispatcher.decide import Plan
from megatron_mux.serve.dispatcher.decisions import Leave, Retire
from megatron_mux.serve.dispatcher.policies import Fair, Fifo, Policy
from megatron_mux.serve.dispatcher.view import BackboneView, Cluster
from tests.unit.serve.dispatcher.simulate import SimulatedJob, Simulation, jain, jain_of_windows, workload

BACKBONES = [BackboneView("a", load_seconds=5.0), BackboneView("b", load_seconds=5.0)]
HASTY = Fair(patience=60.0, turn=30.0, hold=40.0, idle=10.0, leave=2.0)
"""Fair with times as short as the jobs of these tests."""
TICK = 2.0

sizes = st.sampled_from([15, 20, 35, 60, 100])
odd_jobs = st.builds(
    SimulatedJob,
    tenant=st.sampled_from("wxy"),
    arrives_at=st.floats(0.0, 100.0),
    steps=st.sampled_from([1, 5, 20]),
    seconds=st.sampled_from([0.5, 1.0]),
    bytes=sizes,
    backbone=st.sampled_from("ab"),
    priority=st.integers(-1, 1),
)


@st.composite
def streams(draw: st.DrawFn) -> list[SimulatedJob]:
    """Jobs of a tenant for one backbone that come faster than they can be trained, and differ in their steps."""
    tenant, backbone, size = draw(st.sampled_from("xyz")), draw(st.sampled_from("aab")), draw(sizes)
    steps, period = draw(st.sampled_from([8, 20])), draw(st.sampled_from([5.0, 12.0]))
    priority = draw(st.integers(0, 1))
    return [
        SimulatedJob(tenant, n * period, steps + 3 * (n % 5), 1.0, size, backbone, priority)
        for n in range(25)
    ]


def launches_an_hour(simulation: Simulation, slot: int) -> int:
    times = [at for at, own in simulation.launches if own == slot]
    return max((sum(begin <= at < begin + 3600 for at in times) for begin in times), default=0)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(streams(), min_size=1, max_size=3), st.lists(odd_jobs, min_size=1, max_size=5), st.integers(1, 2)
)
def test_no_job_waits_beyond_the_bound(
    flood: list[list[SimulatedJob]], odd: list[SimulatedJob], slots: int
) -> None:
    jobs = [*odd, *(job for stream in flood for job in stream)]
    stays: dict[str, float] = {}
    longest = 0.0

    def watch(cluster: Cluster, _: Plan, now: float) -> None:
        nonlocal longest
        stays.update({job.id: now - job.since for job in cluster.jobs if job.instance is not None})
        longest = max(longest, *stays.values(), 0.0)

    simulation = Simulation(jobs, HASTY, slots, BACKBONES, tick=TICK, check=watch)
    simulation.run(until=10_000.0)
    assert not simulation.open
    others = len({(job.tenant, job.backbone) for job in jobs}) - 1
    change = HASTY.hold + HASTY.leave + 5.0
    bound = HASTY.patience + (others + 1) * (longest + change + 2 * TICK)
    for record in simulation.records.values():
        assert record.finished_at is not None and not record.failed
        for (begin, end), starts in zip(record.waits, record.turns, strict=True):
            assert end - begin <= starts * bound  # those of its queue before it, and its own
    for slot in range(slots):
        assert launches_an_hour(simulation, slot) <= 3600 / HASTY.hold + 1


def starved(policy: Policy) -> float:
    """How long a job waits that needs the whole instance, while small ones of others come all the time."""
    small = [SimulatedJob("xyz"[n % 3], n * 5.0, 30 + 7 * (n % 5), 1.0, 20) for n in range(70)]
    simulation = Simulation([SimulatedJob("w", 50.0, 10, 1.0, 100), *small], policy, tick=5.0)
    simulation.run()
    return next(begin - record.job.arrives_at for record in simulation.records.values()
                for begin in record.starts if record.job.tenant == "w")  # fmt: skip


def test_a_large_job_is_not_passed_for_ever() -> None:
    never = Fair(patience=1e9, slack=1e9)
    assert starved(never) > 1000
    assert starved(HASTY) < 120
    assert starved(Fifo(patience=60.0)) < 400


@pytest.mark.parametrize("policy", [HASTY, Fifo(patience=60.0, hold=40.0, idle=10.0, leave=2.0)])
def test_two_backbones_on_one_slot_are_both_served(policy: Policy) -> None:
    jobs = [SimulatedJob("x", n * 10.0, 100, 1.0, 30, "a") for n in range(40)]
    jobs += [SimulatedJob("y", 100.0 + n, 20, 1.0, 30, "b") for n in range(6)]
    simulation = Simulation(jobs, policy, 1, BACKBONES, tick=TICK)
    simulation.run()
    first = min(record.starts[0] for record in simulation.records.values() if record.job.backbone == "b")
    assert first < (300 if policy.takes_turns else 1000)  # first come, first served: ten others came before
    assert launches_an_hour(simulation, 0) <= 3600 / policy.hold + 1


@pytest.mark.parametrize("bad", range(8))
@pytest.mark.parametrize("slots", [1, 2])
def test_a_job_that_ends_its_instance_is_found(bad: int, slots: int) -> None:
    jobs = [
        SimulatedJob("xyz"[n % 3], 0.0, 30, 1.0, 10, kills_at=3 if n == bad else None)
        for n in range(8 * slots)
    ]
    left: list[object] = []
    simulation = Simulation(
        jobs, Fair(), slots, BACKBONES, tick=1.0,
        check=lambda _, plan, __: left.extend(each for each in plan.decisions if isinstance(each, Leave)),
    )  # fmt: skip
    simulation.run(until=5000.0)
    failed = [record for record in simulation.records.values() if record.failed]
    assert [record.view.number for record in failed] == [bad] and "alone" in failed[0].failed
    assert not simulation.open
    assert len(simulation.deaths) <= 5 and len(simulation.launches) <= slots + 5
    assert len(left) <= 8


def test_jobs_that_are_killed_from_outside_do_not_fail() -> None:
    simulation = Simulation(
        [SimulatedJob("x", 0.0, 50, 1.0, 10) for _ in range(8)], Fair(), 2, BACKBONES, tick=1.0
    )
    for kill in range(1, 20):
        simulation.run(until=40.0 * kill)
        for name in list(simulation._instances)[: 1 if simulation.open else 0]:
            simulation.end_instance(name)
    simulation.run()
    assert all(record.finished_at for record in simulation.records.values())


def test_tenants_get_their_shares_while_one_floods() -> None:
    jobs = workload(1, {"x": 120, "y": 40, "z": 40}, 60.0)
    weights = dict.fromkeys("xyz", 1.0)
    indices: dict[str, list[float]] = {}
    waits: dict[str, dict[str, float]] = {}
    for policy in (Fair(), Fifo()):
        simulation = Simulation(jobs, policy, 2, BACKBONES, tick=30.0)
        simulation.run()
        name = type(policy).__name__
        indices[name] = jain_of_windows(simulation, 300.0, weights)
        waits[name] = {
            tenant: statistics.mean(
                one.starts[0] - one.job.arrives_at
                for one in simulation.records.values()
                if one.job.tenant == tenant
            )
            for tenant in weights
        }
    assert indices["Fair"] and min(indices["Fair"]) >= 0.95
    assert indices["Fifo"] and statistics.median(indices["Fifo"]) < 0.8
    assert waits["Fair"]["y"] < waits["Fifo"]["y"] / 1.5


def test_weights_divide_what_is_trained() -> None:
    jobs = workload(2, {"x": 60, "y": 60}, 10.0)
    simulation = Simulation(jobs, Fair(), 1, tick=30.0, weights={"x": 3.0, "y": 1.0})
    simulation.run()
    indices = jain_of_windows(simulation, 300.0, {"x": 3.0, "y": 1.0})
    assert indices and statistics.median(indices) >= 0.95
    assert jain([1.0, 0.0]) == 0.5


def test_predicted_starts_and_ends_come_true() -> None:
    for policy in (Fair(), Fifo()):
        simulation = Simulation(
            workload(3, {"x": 30, "y": 30}, 0.0), policy, 2, BACKBONES, tick=30.0, predict=True
        )
        simulation.run()
        errors: list[float] = []
        for record in simulation.records.values():
            assert record.predicted is not None and record.finished_at is not None
            start, end = record.predicted
            assert end is not None
            errors.append(abs(end - record.finished_at) / (record.finished_at - record.job.arrives_at))
            if start is not None and record.starts[0] > 60:
                errors.append(abs(start - record.starts[0]) / record.starts[0])
        assert statistics.median(errors) < 0.2


def test_instances_keep_their_backbone_for_a_while() -> None:
    retired: list[float] = []
    jobs = [SimulatedJob("x", 7.0 * n, 2, 1.0, 30, "ab"[n % 2]) for n in range(200)]
    simulation = Simulation(
        jobs, Fair(), 1, BACKBONES, tick=10.0,
        check=lambda _, plan, now: retired.extend(now for each in plan.decisions if isinstance(each, Retire)),
    )  # fmt: skip
    simulation.run()
    assert not simulation.open and retired
    assert all(later - sooner >= 600 for sooner, later in zip(retired, retired[1:], strict=False))
