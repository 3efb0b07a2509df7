"""Who stops and who goes on, against brute force and by properties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_mux.sweep.halving import Halving
from megatron_mux.sweep.median import MedianStopping
from megatron_mux.sweep.scheduler import Configuration, Decision, Scheduler, comparable, ordinal


class World:
    """Configurations that train a step at a time, at most `room` together, as a scheduler decides.

    Args:
        curves: The figure of each configuration after each of its steps.
    """

    def __init__(
        self, scheduler: Scheduler, curves: Sequence[Sequence[float]], room: int, every: int
    ) -> None:
        self.scheduler, self.curves, self.room, self.every = scheduler, curves, room, every
        self.steps = {f"c{i}": 0 for i in range(len(curves))}
        self.known = {
            name: Configuration(name, len(curve)) for name, curve in zip(self.steps, curves, strict=True)
        }
        self.queue, self.training = list(self.known), list[str]()
        self.decisions: list[Decision] = []

    def run(self) -> None:
        while self.queue or self.training:
            while self.queue and len(self.training) < self.room:
                self.training.append(self.queue.pop(0))
            arrived = [name for name in list(self.training) if self._step(name)]
            decided = self.scheduler.decide(list(self.known.values()), arrived)
            self.decisions += decided
            for own in decided:
                if own.action == "prune":
                    self.training.remove(own.name)
                else:
                    self.queue.insert(0, own.name)
                self.known[own.name] = replace(
                    self.known[own.name], state="pruned" if own.action == "prune" else "open"
                )

    def _step(self, name: str) -> bool:
        own, self.steps[name] = self.known[name], self.steps[name] + 1
        step = self.steps[name]
        ends = step == own.total_steps
        if not (ends or step % self.every == 0 or step in self.scheduler.evaluation_steps(own.total_steps)):
            return False
        values = {**own.values, step: self.curves[int(name[1:])][step - 1]}
        self.known[name] = replace(own, values=values, state="over" if ends else "open")
        if ends:
            self.training.remove(name)
        return True


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count, factor = draw(st.integers(1, 20)), draw(st.integers(2, 4))
    every = draw(st.sampled_from((1, 2, 3, 1000)))
    value = st.integers(0, 5).map(float) | st.just(math.inf)
    curves = [draw(st.lists(value, min_size=1, max_size=20)) for _ in range(count)]
    return World(Halving(draw(st.integers(1, 5)), factor), curves, draw(st.integers(1, count)), every)


@given(worlds())
def test_whatever_the_room_somebody_trains_in_full_and_nobody_is_stopped_among_the_best(world: World) -> None:
    world.run()
    assert any(world.steps[name] == own.total_steps for name, own in world.known.items())
    halving = world.scheduler
    assert isinstance(halving, Halving)
    for name, own in world.known.items():
        if own.state != "pruned":
            assert own.state == "over"
            continue
        rung = max(own.values)
        assert rung == world.steps[name] and rung in halving.evaluation_steps(own.total_steps)
        there = [other.values[rung] for other in world.known.values() if rung in other.values]
        better = sum(value <= own.values[rung] for value in there)
        assert better > max(1, len(there) // halving.factor) - 1, "it should have gone on"


@given(worlds())
def test_evaluations_between_rungs_change_no_decision(world: World) -> None:
    without = World(world.scheduler, world.curves, world.room, 1000)
    world.run()
    without.run()
    assert (world.steps, world.decisions) == (without.steps, without.decisions)


@given(
    st.integers(2, 30).flatmap(lambda n: st.permutations(range(n))),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(1, 30),
)
def test_where_all_train_at_once_it_is_successive_halving(
    places: list[int], first: int, factor: int, total: int
) -> None:
    """With figures that tell the final order from the first step on, the best `1 / factor` are left at each rung."""
    world = World(Halving(first, factor), [[float(place)] * total for place in places], len(places), 1000)
    world.run()
    left, rung = len(places), first
    while rung < total:
        left = max(1, left // factor)
        going_on = sorted(
            places[i]
            for i, (name, own) in enumerate(world.known.items())
            if world.steps[name] > rung or own.state == "over"
        )
        assert going_on == list(range(left))
        rung *= factor


def test_one_that_stopped_goes_on_once_worse_ones_have_come() -> None:
    world = World(Halving(1, 2), [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], 1, 1000)
    world.run()
    decided = [(own.name, own.action) for own in world.decisions]
    assert decided == [("c0", "prune"), ("c0", "resume"), ("c1", "prune")]
    assert world.steps == {"c0": 3, "c1": 1}
    assert "1st of 2 at step 1 by now, where the best one goes on" in world.decisions[1].reason


def test_those_that_a_sampler_is_going_to_choose_are_waited_for() -> None:
    halving, alone = Halving(2, 3), [Configuration("a", 9, {2: 1.0})]
    (stops,) = halving.decide(alone, ["a"], more_to_come=True)
    assert (stops.action, stops.reason) == ("prune", "1st of 1 at step 2, where nobody goes on yet")
    assert halving.decide(alone, ["a"]) == []
    held = [replace(alone[0], state="pruned")]
    assert [own.action for own in halving.decide(held, [])] == ["resume"]


def test_one_that_failed_or_ended_there_takes_nobodys_place() -> None:
    """The best one at the rung diverges afterwards; another has its end where the others have a rung."""
    failed = Configuration("failed", 9, {2: 1.0}, "failed")
    ended = Configuration("ended", 2, {2: 1.5}, "over")
    held = [Configuration(name, 9, {2: value}, "pruned") for name, value in (("a", 2.0), ("b", 3.0))]
    decided = Halving(2, 3).decide([failed, ended, *held], [])
    assert [(own.name, own.action) for own in decided] == [("a", "resume")]


def test_who_was_not_evaluated_now_is_left_alone() -> None:
    configurations = [
        Configuration(name, 9, {2: value}) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    ]
    assert [own.name for own in Halving(2, 3).decide(configurations, ["c"])] == ["c"]


def test_the_median_rule_by_hand() -> None:
    rule = MedianStopping(4)
    others = [
        Configuration(name, 9, {2: 9.0, 4: value}) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))
    ]
    # Their running means at step 4 are 5, 5.5 and 6.
    for best, stops in ((5.4, False), (5.5, False), (5.6, True)):
        own = Configuration("d", 9, {2: 9.0, 4: best})
        decided = rule.decide([*others, own], ["d"])
        assert [decision.name for decision in decided] == ["d"] * stops
    assert not rule.decide([*others[:2], own], ["d"]), "too few others"
    assert not rule.decide([*others, Configuration("d", 9, {2: 99.0})], ["d"]), "too early"
    assert not rule.decide([*others, Configuration("d", 4, {4: 99.0}, "over")], ["d"]), "it has ended"


def test_what_is_not_finite_is_worst() -> None:
    assert comparable(None) == comparable(math.nan) == comparable(-math.inf) == math.inf
    assert list(map(ordinal, (1, 2, 3, 4, 11, 12, 13, 21, 102, 111))) == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th")
    ]
