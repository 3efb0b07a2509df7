"""Reservations never exceed memory, nobody starves, and nobody passes the first in the queue beyond the rules."""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_mux.split.server.scheduler import Demand, Scheduler, SchedulerOptions

CAPACITY = 100
OPTIONS = {
    "menos": SchedulerOptions(),
    "easy": SchedulerOptions(easy=True),
    "weights": SchedulerOptions(weights={"a": 3.0}, ageing=0.5),
    "rate": SchedulerOptions(rate=20.0),
    "all": SchedulerOptions(easy=True, weights={"b": 2.0}, ageing=0.1, rate=30.0),
}

Script = list[tuple[str, int, str, int]]
scripts = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "release", "shrink", "cancel", "wait"]),
        st.integers(0, 10).map(lambda tenths: tenths * CAPACITY // 10),
        st.sampled_from("abc"),
        st.integers(0, 7),
    ),
    max_size=60,
)


@dataclass
class Naive:
    """Algorithm 2 of the paper, line by line."""

    free: int = CAPACITY
    waiting: list[Demand] = field(default_factory=list)

    def schedule(self) -> list[int]:
        granted: list[int] = []
        if self.waiting and self.waiting[0].size <= self.free:
            for demand in list(self.waiting):
                if demand.size <= self.free:
                    self.free -= demand.size
                    self.waiting.remove(demand)
                    granted.append(demand.key)
        return granted


@dataclass
class Play:
    """Plays events on a scheduler, and on a naive one beside it; checks after each what must hold."""

    scheduler: Scheduler
    naive: Naive | None = None
    now: float = 0.0
    waiting: dict[int, Demand] = field(default_factory=dict)
    running: dict[int, int] = field(default_factory=dict)

    def grant(self) -> None:
        granted = [demand.key for demand in self.scheduler.grant(self.now)]
        if self.naive is not None:
            assert granted == self.naive.schedule()
        for key in granted:
            self.running[key] = self.waiting.pop(key).size
        assert self.scheduler.reserved == sum(self.running.values()) <= CAPACITY
        assert self.scheduler.free == CAPACITY - self.scheduler.reserved
        assert self.scheduler.waiting == len(self.waiting)

    def submit(self, demand: Demand) -> None:
        self.scheduler.submit(demand, self.now)
        self.waiting[demand.key] = demand
        if self.naive is not None:
            self.naive.waiting.append(demand)

    def cancel(self, key: int) -> None:
        self.scheduler.cancel(key)
        demand = self.waiting.pop(key)
        if self.naive is not None:
            self.naive.waiting.remove(demand)

    def shrink(self, key: int, size: int) -> None:
        if size:
            self.scheduler.shrink(key, size)
        else:
            self.scheduler.release(key, self.now)
            assert not self.scheduler.has_reserved(key)
        if self.naive is not None:
            self.naive.free += self.running[key] - size
        self.running[key] = size
        if not size:
            del self.running[key]

    def play(self, script: Script) -> None:
        for number, (what, size, client, choice) in enumerate(script):
            self.now += 0.3
            if what == "submit":
                self.submit(
                    Demand(number, client, size, 1 + choice, None, choice / 3, size // 2 * (choice % 2))
                )
            elif what == "cancel" and self.waiting:
                self.cancel(sorted(self.waiting)[choice % len(self.waiting)])
            elif what in ("release", "shrink") and self.running:
                key = sorted(self.running)[choice % len(self.running)]
                self.shrink(key, self.running[key] // 2 if what == "shrink" else 0)
            self.grant()

    def end_all(self) -> None:
        """Let everything end, a reservation at a time."""
        while self.running or self.waiting:
            if self.running:
                self.shrink(min(self.running), 0)
            else:
                later = self.scheduler.next_event(self.now)
                assert later is not None, "nobody starves"
                self.now = max(self.now, later)
            self.grant()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=60, deadline=None)
@given(script=scripts)
def test_memory_is_never_exceeded_and_everybody_is_granted(options: SchedulerOptions, script: Script) -> None:
    play = Play(Scheduler(CAPACITY, options))
    play.play(script)
    play.end_all()
    assert play.scheduler.free == CAPACITY


@settings(max_examples=200, deadline=None)
@given(script=scripts)
def test_the_default_is_algorithm_2(script: Script) -> None:
    play = Play(Scheduler(CAPACITY), Naive())
    play.play(script)
    play.end_all()


@dataclass
class Run:
    """Runs demands that arrive at times, take a while, then keep a part of their memory for another while.

    Attributes:
        started: When each was granted.
        first_at: When each was seen to be the first in the queue, in the order of arrival.
        told: The earliest start that was ever worked out for the first in the queue, from what runs beside it.
    """

    scheduler: Scheduler
    started: dict[int, float] = field(default_factory=dict)
    first_at: dict[int, float] = field(default_factory=dict)
    told: dict[int, float] = field(default_factory=dict)

    def run(self, arrivals: list[tuple[float, Demand, float, float]]) -> None:
        waiting: dict[int, tuple[Demand, float, float]] = {}
        running: dict[int, Demand] = {}
        events = [(at, i, "arrives", demand) for i, (at, demand, _, _) in enumerate(arrivals)]
        heapq.heapify(events)
        while events:
            now, _, what, demand = heapq.heappop(events)
            if what == "arrives":
                self.scheduler.submit(demand, now)
                waiting[demand.key] = arrivals[demand.key][1:]
            elif what == "ends":
                del running[demand.key]
                self.scheduler.shrink(demand.key, demand.keeps)
            else:
                self.scheduler.release(demand.key, now)
            for granted in self.scheduler.grant(now):
                _, seconds, kept_for = waiting.pop(granted.key)
                self.started[granted.key], running[granted.key] = now, granted
                heapq.heappush(events, (now + seconds, granted.key, "ends", granted))
                heapq.heappush(events, (now + seconds + kept_for, granted.key, "frees", granted))
            if waiting:
                self._look(now, waiting[min(waiting)][0], running)

    def _look(self, now: float, first: Demand, running: dict[int, Demand]) -> None:
        self.first_at.setdefault(first.key, now)
        free = self.scheduler.free
        for one in sorted(running.values(), key=lambda own: self.started[own.key] + own.expected_s):
            free += one.size - one.keeps
            if free >= first.size:
                start = max(now, self.started[one.key] + one.expected_s)
                self.told[first.key] = min(start, self.told.get(first.key, start))
                break


def jobs(most: int) -> st.SearchStrategy[list[tuple[int, int, int, int, int]]]:
    """Sizes, seconds, expected seconds, seconds to the next one, and seconds that half of the memory is kept for."""
    few = st.integers(0, 3)
    return st.lists(
        st.tuples(st.integers(1, most), st.integers(1, 5), few, few, st.integers(0, 5)), min_size=2
    )


def arrivals(
    jobs: list[tuple[int, int, int, int, int]], exact: bool
) -> list[tuple[float, Demand, float, float]]:
    found, at = [], 0.0
    for key, (size, seconds, expected, gap, kept_for) in enumerate(jobs):
        at += gap
        keeps = size // 2 if kept_for else 0
        demand = Demand(key, "a", size, 1, None, float(seconds if exact else expected), keeps)
        found.append((at, demand, float(seconds), float(kept_for)))
    return found


@settings(max_examples=200, deadline=None)
@given(jobs=jobs(CAPACITY))
def test_with_exact_expectations_easy_starts_the_first_by_its_reservation(
    jobs: list[tuple[int, int, int, int, int]],
) -> None:
    run = Run(Scheduler(CAPACITY, SchedulerOptions(easy=True)))
    run.run(arrivals(jobs, exact=True))
    assert len(run.started) == len(jobs)
    assert all(run.started[key] <= start for key, start in run.told.items())


@pytest.mark.parametrize("easy", [False, True])
@settings(max_examples=100, deadline=None)
@given(jobs=jobs(60))
def test_whatever_is_expected_the_first_waits_only_for_what_was_there(
    easy: bool, jobs: list[tuple[int, int, int, int, int]]
) -> None:
    """Its reservation is at most 3 s ahead; then nobody passes it until all others have ended, after 5 + 5 s."""
    jobs = [*jobs[: len(jobs) // 2], (CAPACITY, 1, 1, 0, 0), *jobs[len(jobs) // 2 :], *jobs]
    run = Run(Scheduler(CAPACITY, SchedulerOptions(easy=easy)))
    run.run(arrivals(jobs, exact=False))
    assert len(run.started) == len(jobs)
    assert all(run.started[key] <= at + 3 + 5 + 5 for key, at in run.first_at.items())


@pytest.mark.parametrize("expected_s", [0.0, 1.0])
def test_easy_stops_backfilling_when_a_reservation_has_passed(expected_s: float) -> None:
    """Two of half the memory always run, for longer than expected: the first needs all of it."""
    scheduler = Scheduler(CAPACITY, SchedulerOptions(easy=True))
    halves = [Demand(key, "a", 50, expected_s=expected_s) for key in range(20)]
    for key in (0, 1):
        scheduler.submit(halves[key], float(key))
        assert scheduler.grant(float(key)) == [halves[key]]
    scheduler.submit(Demand(20, "b", CAPACITY), 2.0)
    for key in range(2, 20):
        if scheduler.has_reserved(key - 2):
            scheduler.release(key - 2, 2.0 * key)
        scheduler.submit(halves[key], 2.0 * key)
        if [demand.key for demand in scheduler.grant(2.0 * key)] == [20]:
            return
    pytest.fail("the first starves")


@pytest.mark.parametrize(("easy", "passing"), [(False, []), (True, [3, 5])])
def test_who_may_pass_the_first(easy: bool, passing: list[int]) -> None:
    """It will start at 10 s with 30 to spare: 3 ends before, 4 is too large, 5 is not, and leaves nothing to 6."""
    scheduler = Scheduler(CAPACITY, SchedulerOptions(easy=easy))
    scheduler.submit(Demand(1, "a", 50, expected_s=10.0), 0.0)
    assert [demand.key for demand in scheduler.grant(0.0)] == [1]
    for key, size, seconds in ((2, 70, 5.0), (3, 10, 9.0), (4, 31, 20.0), (5, 30, 20.0), (6, 1, 20.0)):
        scheduler.submit(Demand(key, "a", size, expected_s=seconds), 0.0)
    assert [demand.key for demand in scheduler.grant(0.0)] == passing
    for key in (1, *passing):
        scheduler.release(key, 10.0)
    assert scheduler.grant(10.0)[0].key == 2


@pytest.mark.parametrize("easy", [False, True])
def test_weights_are_shares_of_a_saturated_server(easy: bool) -> None:
    """Clients send their next request when one has ended; four run at once."""
    weights = {"a": 3.0, "b": 1.0, "c": 2.0}
    scheduler = Scheduler(40, SchedulerOptions(easy=easy, weights=weights))
    rng, now, ends, done = random.Random(0), 0.0, list[tuple[float, int, str]](), Counter[str]()
    for key in range(30):
        scheduler.submit(Demand(key, "abc"[key % 3], 10, 5, expected_s=1.0), now)
    for key in range(30, 3030):
        for demand in scheduler.grant(now):
            done[demand.client] += demand.tokens
            heapq.heappush(ends, (now + rng.uniform(0.5, 1.5), demand.key, demand.client))
        now, ended, client = heapq.heappop(ends)
        scheduler.release(ended, now)
        scheduler.submit(Demand(key, client, 10, 5, expected_s=1.0), now)
    for client, weight in weights.items():
        assert done[client] / done.total() == pytest.approx(weight / 6, rel=0.02)


def test_a_client_that_was_away_has_saved_up_nothing() -> None:
    scheduler = Scheduler(10, SchedulerOptions(weights={}))
    for key in range(40):
        scheduler.submit(Demand(key, "a", 10, tokens=5), 0.0)
    for key in range(40):
        if key == 10:
            for late in range(40, 44):
                scheduler.submit(Demand(late, "b", 10, tokens=5), 1.0)
        (demand,) = scheduler.grant(1.0)
        scheduler.release(demand.key, 1.0)
        if 10 <= key < 14:
            assert demand.client == "ab"[(key + (key >= 10)) % 2]


def test_ageing_leads_back_to_the_order_of_arrival() -> None:
    def order(ageing: float) -> str:
        scheduler = Scheduler(10, SchedulerOptions(weights={"a": 1.0, "b": 100.0}, ageing=ageing))
        for key in range(12):
            scheduler.submit(Demand(key, "ab"[key % 2], 10, tokens=5), float(key))
        found = ""
        while scheduler.waiting:
            (demand,) = scheduler.grant(20.0)
            found += demand.client
            scheduler.release(demand.key, 20.0)
        return found

    assert order(0.0)[:6].count("b") == 5
    assert order(1000.0) == "ab" * 6


def test_a_rate_limit_holds_back_its_own_client_only() -> None:
    """A second's worth passes at once; those held back are behind whoever has come meanwhile."""
    scheduler = Scheduler(1, SchedulerOptions(rate=10.0))
    for key, client in enumerate("aaaaab"):
        scheduler.submit(Demand(key, client, 1, tokens=5), 0.0)

    def order(now: float) -> list[int]:
        found = []
        while granted := scheduler.grant(now):
            found.append(granted[0].key)
            scheduler.release(granted[0].key, now)
        return found

    assert order(0.0) == [0, 1, 2, 5]
    assert scheduler.waiting == 2 and scheduler.next_event(0.0) == pytest.approx(0.5)
    assert order(0.5) == [3]
    scheduler.cancel(4)
    assert scheduler.next_event(0.5) is None
    scheduler.submit(Demand(6, "a", 1, tokens=5), 0.5)
    assert scheduler.next_event(0.5) == pytest.approx(1.0), "a cancelled one does not count"


def test_a_cancelled_demand_does_not_count_for_weights() -> None:
    scheduler = Scheduler(10, SchedulerOptions(weights={}))
    scheduler.submit(Demand(0, "a", 10, tokens=1), 0.0)
    for key in range(1, 10):
        scheduler.submit(Demand(key, "a", 10, tokens=100), 0.0)
        scheduler.cancel(key)
    scheduler.submit(Demand(10, "a", 10, tokens=1), 0.0)
    scheduler.submit(Demand(11, "b", 10, tokens=2), 0.0)
    scheduler.submit(Demand(12, "b", 10, tokens=2), 0.0)
    order = []
    while granted := scheduler.grant(0.0):
        order.append(granted[0].key)
        scheduler.release(granted[0].key, 0.0)
    assert order == [0, 11, 10, 12]


def test_what_cannot_be_is_refused() -> None:
    scheduler = Scheduler(CAPACITY)
    with pytest.raises(ValueError, match="more than"):
        scheduler.submit(Demand(1, "a", CAPACITY + 1), 0.0)
    scheduler.submit(Demand(2, "a", 10), 0.0)
    assert scheduler.grant(0.0)
    with pytest.raises(ValueError, match="cannot become"):
        scheduler.shrink(2, 11)
    with pytest.raises(KeyError):
        scheduler.cancel(2)
    for wrong in (
        {"weights": {"a": 0.0}},
        {"rate": -1.0},
        {"ageing": -1.0},
        {"weights": {"a": float("nan")}},
    ):
        with pytest.raises(ValueError, match="must be"):
            SchedulerOptions(**wrong)


@pytest.mark.parametrize("easy", [False, True])
def test_a_decision_takes_microseconds_with_a_thousand_waiting(easy: bool) -> None:
    """The paper's takes 100 us at most; here of CPU time, in the median (benchmarks/split_scheduler.py)."""
    scheduler = Scheduler(1000, SchedulerOptions(easy=easy))
    for key in range(1300):
        scheduler.submit(Demand(key, f"client {key}", 100 + key % 700, expected_s=key % 13), 0.0)
    seconds, running = [], []
    for turn in range(200):
        began = time.thread_time()
        granted = scheduler.grant(float(turn))
        seconds.append(time.thread_time() - began)
        running += [demand.key for demand in granted]
        scheduler.release(running.pop(0), float(turn))
    assert scheduler.waiting >= 800
    assert sorted(seconds)[len(seconds) // 2] < 1e-4
