"""When jobs will probably begin and end: the queue is served forward in time, with predicted durations.

It simplifies what the dispatcher does: the order of the queue stays as it is now, nobody arrives, is asked to leave for
others, or is kept apart by suspicion, and an instance keeps its backbone.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_mux.serve.dispatcher.policies import Policy
from megatron_mux.serve.dispatcher.rates import Rates
from megatron_mux.serve.dispatcher.room import Room, departures
from megatron_mux.serve.dispatcher.view import JobView

_DEPTH = 32
"""Jobs of a queue that are looked at when an instance has room: bounds the time that a forecast takes."""


@dataclass(frozen=True)
class Forecast:
    """When a job will probably begin and end; None: nothing tells. `start` is None for jobs on instances."""

    start: float | None = None
    end: float | None = None


_LEAST = 1e-6
"""Steps, or seconds, that are as good as none."""


class _Lane:
    """An instance in the forecast."""

    def __init__(self, room: Room, rates: Rates, now: float) -> None:
        self.room, self.rates = room, rates
        self.free, self.at, self.version = room.free, max(now, room.ready_at), 0
        self.jobs = {job.id: job for job in room.stepping}
        self.left = {job.id: job.steps for job in room.stepping}
        self.going = [room.jobs[name] for name in room.leaving]
        self.suspicion = any(job.suspects for job in room.stepping)
        self.reserved_for: JobView | None = None
        self._departures: list[tuple[float, JobView]] | None = None
        self._step = self._joint_step()

    @property
    def places(self) -> int:
        """How many more jobs it takes."""
        return self.room.most_jobs - len(self.jobs) - len(self.going)

    def begin(self, job: JobView) -> None:
        self.jobs[job.id], self.left[job.id] = job, job.steps
        self.free -= job.bytes
        self._departures = None

    def advance(self, at: float) -> list[JobView]:
        """Go on to a time; returns the jobs that have finished by then."""
        if self._step > 0:
            steps = (at - self.at) / self._step
            self.left = {name: left - steps for name, left in self.left.items()}
        self.at = at
        # Seconds since 1970 have no finer parts than a quarter of a microsecond: less would never go by.
        over = [self.jobs[name] for name, left in self.left.items() if min(left, left * self._step) <= _LEAST]
        for job in over:
            del self.jobs[job.id], self.left[job.id]
        self.free += sum(job.bytes for job in (*over, *self.going))
        self.going, self.suspicion, self._departures = [], False, None
        return over

    def next_event(self) -> float:
        """When something happens here next, given who is here now."""
        self._step = self._joint_step()
        self.version += 1
        if self.going:
            return self.at + self.room.leave
        if self.suspicion:
            return self.at + self._step  # over with the next step; others may begin then
        return self.at + min(self.left.values()) * self._step if self.left else math.inf

    def earliest(self, job: JobView) -> float:
        """When there is room for a job if nobody else begins here."""
        if self._departures is None:
            left = [(steps, self.jobs[name]) for name, steps in self.left.items()]
            self._departures = departures(self.room.backbone, left, self.rates)
        free, places = self.free, self.places
        if job.bytes <= free and places > 0:
            return self.at
        for seconds, other in self._departures:
            free, places = free + other.bytes, places + 1
            if job.bytes <= free and places > 0:
                return self.at + seconds
        return math.inf

    def _joint_step(self) -> float:
        return self.rates.joint_step(self.room.backbone, [job.seconds for job in self.jobs.values()])


def forecast(
    rooms: Sequence[Room],
    queue: Sequence[JobView],
    limits: Mapping[str, int | None],
    running: Mapping[str, int],
    policy: Policy,
    now: float,
) -> dict[str, Forecast]:
    """Predict when jobs begin and end.

    Args:
        rooms: Instances with the jobs that they have, or that wait for them to be ready.
        queue: Jobs that wait, in the order in which they are served.
        limits: How many jobs each tenant may have on instances at once.
        running: How many it has.

    Returns:
        Of all jobs in `rooms` and `queue`, by id.
    """
    return _Future(rooms, queue, limits, running, policy, now).run()


class _Future:
    def __init__(
        self,
        rooms: Sequence[Room],
        queue: Sequence[JobView],
        limits: Mapping[str, int | None],
        running: Mapping[str, int],
        policy: Policy,
        now: float,
    ) -> None:
        self.lanes = [_Lane(room, policy.rates, now) for room in rooms]
        placed = {name for lane in self.lanes for name in lane.jobs}
        self.waiting: dict[str, list[JobView]] = {}
        for job in queue:
            if job.id not in placed:
                self.waiting.setdefault(job.backbone, []).append(job)
        self.limits, self.running = limits, Counter(running)
        self.starts: dict[str, float] = {}
        for lane in self.lanes:
            if not lane.room.ready:
                self.starts |= dict.fromkeys(lane.jobs, lane.at)
        self.ends: dict[str, float] = {}
        self.known = [job.id for job in queue] + [job.id for room in rooms for job in room.jobs.values()]
        self.reserved: set[str] = set()
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> dict[str, Forecast]:
        for index, lane in enumerate(self.lanes):
            if not lane.room.ready:
                heapq.heappush(self.events, (lane.at, index, lane.version))
            else:
                self._await(index)
        while self.events:
            at, index, version = heapq.heappop(self.events)
            lane = self.lanes[index]
            if version != lane.version:
                continue
            limited = False
            for job in lane.advance(at):
                self.ends[job.id] = at
                self.running[job.tenant] -= 1
                limited = limited or self.limits.get(job.tenant) is not None
            self._fill(index, at)
            if limited:
                self._fill_others(index, at)
        return {name: Forecast(self.starts.get(name), self.ends.get(name)) for name in self.known}

    def _fill_others(self, index: int, at: float) -> None:
        """Start jobs elsewhere which a tenant's limit has kept back."""
        for other, lane in enumerate(self.lanes):
            if other != index and lane.at <= at and self.waiting.get(lane.room.backbone) and not lane.going:
                for job in lane.advance(at):
                    self.ends[job.id] = at
                    self.running[job.tenant] -= 1
                self._fill(other, at)

    def _await(self, index: int) -> None:
        at = self.lanes[index].next_event()
        if at < math.inf:
            heapq.heappush(self.events, (at, index, self.lanes[index].version))

    def _fill(self, index: int, at: float) -> None:
        """Start on an instance whom it has room for, in order, behind the job that it is reserved for."""
        lane = self.lanes[index]
        backbone = lane.room.backbone
        waiting = self.waiting.get(backbone, [])
        held = lane.reserved_for
        if held is not None and held.id not in self.starts and held.bytes <= lane.free and lane.places > 0:
            self._begin(held, lane, at)
        if held is not None and held.id in self.starts:
            lane.reserved_for = None
            self.reserved.discard(backbone)
        if lane.reserved_for is None:
            for job in waiting[:_DEPTH]:
                if job.id in self.starts or self._is_limited(job.tenant):
                    continue
                if (job.need_bytes or 0) <= lane.free and lane.places > 0:
                    self._begin(job, lane, at)
                elif backbone not in self.reserved and self._reserve(job) is lane:
                    break
        self.waiting[backbone] = [job for job in waiting[:_DEPTH] if job.id not in self.starts] + waiting[
            _DEPTH:
        ]
        self._await(index)

    def _is_limited(self, tenant: str) -> bool:
        limit = self.limits.get(tenant)
        return limit is not None and self.running[tenant] >= limit

    def _begin(self, job: JobView, lane: _Lane, at: float) -> None:
        lane.begin(job)
        self.starts[job.id] = at
        self.running[job.tenant] += 1

    def _reserve(self, job: JobView) -> _Lane | None:
        """Keep the instance free for a job which has room for it first."""
        lanes = [lane for lane in self.lanes if lane.room.backbone == job.backbone]
        times = [lane.earliest(job) for lane in lanes]
        best = min(range(len(lanes)), key=lambda index: (times[index], index), default=None)
        if best is None or times[best] == math.inf:
            return None
        self.reserved.add(job.backbone)
        lanes[best].reserved_for = job
        return lanes[best]
