"""Plans change between steps, at the same step whatever the planner takes, and nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import pytest

from megatron_mux.engine.planning import Planning
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, Policy
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from tests.unit.fusion import backbone

STEP = 0.3


class Slow(Planner):
    """A planner that works when it is let; each plan is one hybrid task, named by how many were made."""

    memory_limit: float | None = None

    def __init__(self, seconds: float = STEP) -> None:
        self.go = threading.Event()
        self.go.set()
        self.made: list[tuple[str, ...]] = []
        self._seconds = seconds

    def plan(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """See `Planner`."""
        assert self.go.wait(30)
        self.made.append(tuple(sorted(loads)))
        return Plan("auto", 1, (Bucket((HybridTask(tuple(sorted(loads))),), 7),), costs="planned")

    def check(self, loads: Mapping[str, TaskLoad]) -> None:
        """See `Planner`."""

    def refuse(self, plan: Plan, tasks: Mapping[str, TaskLoad]) -> NoReturn:
        """See `Planner`."""
        raise UserError("too large")

    def priced(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> Plan:
        """See `Planner`."""
        # Of two sequences a task, those that are computed at once.
        most = max(2 * len(bucket.tasks) / bucket.micro_batches for bucket in plan.buckets)
        return replace(plan, predicted_latency_s=self._seconds, memory_bytes=(most,))


def loads(names: str) -> dict[str, TaskLoad]:
    return {name: backbone.load(name, [8, 8]) for name in names}


def step(planning: Planning, names: str) -> Plan:
    """Take a step of these tasks."""
    plan = planning.begin(loads(names))
    planning.count(1)
    return plan


@pytest.mark.parametrize("now", ["a", "abc", "ac"])
def test_steps_go_on_while_the_planner_works(now: str) -> None:
    slow = Slow()
    planning = Planning("auto", 1, slow)
    step(planning, "ab")
    slow.go.clear()
    plans = [step(planning, now) for _ in range(2)]  # half a second of planning: two steps, then the next
    for plan in plans:
        assert sorted(plan.tasks) == sorted(now)
    assert plans[0].buckets[0].micro_batches == 7, "those who stay keep their bucket"
    assert len(slow.made) == 1, "nobody waited"
    slow.go.set()
    last = step(planning, now)
    assert last.tasks == tuple(sorted(now)) and len(last.buckets) == 1 and slow.made[-1] == last.tasks


def test_every_rank_changes_at_the_same_step() -> None:
    """However long the planner takes on one of them."""
    histories = []
    for hurried in (True, False):
        slow = Slow(0.1)
        planning = Planning("auto", 1, slow)
        step(planning, "ab")
        if not hurried:
            slow.go.clear()
            threading.Timer(0.3, slow.go.set).start()
        histories.append([len(step(planning, "abc").buckets) for _ in range(12)])
    assert histories[0] == histories[1] and set(histories[0]) == {1, 2}


def test_a_step_that_was_not_taken_does_not_count() -> None:
    """A plan that did not fit begins anew, as what it was relieved to, and the planner has as many steps as before."""
    slow = Slow()
    planning = Planning("auto", 1, slow)
    step(planning, "ab")
    slow.go.clear()
    for _ in range(5):
        planning.fall_back_to(planning.begin(loads("abc")))
        assert planning.steps_left == 2
    assert [len(step(planning, "abc").buckets) for _ in range(2)] == [2, 2], "nobody waited"
    slow.go.set()
    assert len(step(planning, "abc").buckets) == 1


@pytest.mark.parametrize("policy", ["spatial", "temporal"])
def test_who_joined_first_decides_nothing(policy: Policy) -> None:
    """A run that is continued registers its tasks in another order."""
    first, second = (Planning(policy, 1).begin(loads(names)) for names in ("abc", "cba"))
    assert first == second and first.tasks == ("a", "b", "c")


def test_a_second_change_begins_anew() -> None:
    slow = Slow()
    planning = Planning("auto", 1, slow)
    step(planning, "ab")
    step(planning, "abc")
    for _ in range(3):
        last = step(planning, "bc")
    assert last.tasks == ("b", "c") and last.costs == "planned" and len(last.buckets) == 1


@pytest.mark.parametrize("steps_before_the_save", [0, 1, 3])
@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_continued_run_changes_when_the_first_would_have(names: str, steps_before_the_save: int) -> None:
    """Whether it was saved before the first step with other tasks, which is when a task finishes, or later."""
    first = Planning("auto", 1, Slow(0.1))
    step(first, "ab")
    for _ in range(steps_before_the_save):
        step(first, names)
    saved = Plan.from_json(first.next(loads(names)).to_json())
    assert saved.replan_in > 1
    second = Planning("auto", 1, Slow(0.1), given=saved)
    for _ in range(12):
        ours, theirs = step(first, names), step(second, names)
        assert (ours.buckets, first.next(loads(names))) == (theirs.buckets, second.next(loads(names)))
    assert ours.costs == "planned" and len(ours.buckets) == 1


def test_a_plan_that_cannot_be_made_leaves_the_old_one() -> None:
    class Failing(Slow):
        def plan(self, loads: Mapping[str, TaskLoad]) -> Plan:
            if len(loads) == 3:
                raise UserError("too large")
            return super().plan(loads)

    planning = Planning("auto", 1, Failing())
    step(planning, "ab")
    for _ in range(5):
        plan = step(planning, "abc")
    assert sorted(plan.tasks) == ["a", "b", "c"]
    assert planning.log_lines == ["planning failed, keeping the old plan: too large"]


def test_ranks_follow_the_first() -> None:
    """A rank that does not lead makes no plan after the first, and takes what is shared."""
    follower = Slow()
    theirs = Slow().plan(loads("abc"))
    shared: list[object] = []

    def share(what: object) -> object:
        shared.append(what)
        return (theirs, "") if isinstance(what, tuple) and what[0] is None else what

    planning = Planning("auto", 1, follower, leads=False, share=share)
    step(planning, "ab")
    for _ in range(4):
        last = step(planning, "abc")
    assert last == theirs and follower.made == [("a", "b")]


def test_looking_at_the_next_plan_changes_nothing() -> None:
    planning = Planning("auto", 1, Slow())
    step(planning, "ab")
    for _ in range(5):
        assert planning.next(loads("abc")).tasks == ("a", "b", "c")
    assert len(step(planning, "abc").buckets) == 2


@pytest.mark.parametrize(("limit", "parts"), [(None, [7, 1]), (2, [7, 1]), (1, [7, 2])])
def test_newcomers_are_as_cautious_as_memory_is_short(limit: float | None, parts: list[int]) -> None:
    slow = Slow()
    slow.memory_limit = limit
    planning = Planning("auto", 1, slow)
    step(planning, "ab")
    assert [bucket.micro_batches for bucket in step(planning, "abc").buckets] == parts


def test_newcomers_that_fit_in_no_way_are_refused() -> None:
    slow = Slow()
    slow.memory_limit = 0.5
    planning = Planning("auto", 1, slow)
    step(planning, "ab")
    with pytest.raises(UserError, match="too large"):
        step(planning, "abc")


def test_the_real_planner_refuses_what_does_not_fit_before_anyone_runs() -> None:
    tables = backbone.MadeUpTables()
    planner = Planner(PlanningContext(backbone.profile(), backbone.info(), memory_limit=1e6, tables=tables))
    with pytest.raises(UserError, match="give more memory"):
        planner.check(loads("ab"))
