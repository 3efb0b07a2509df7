"""Who comes next, and where: first come first served, and the fair policy."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_mux.serve.dispatcher.accounts import CREDIT
from megatron_mux.serve.dispatcher.rates import Rates
from megatron_mux.serve.dispatcher.room import Room
from megatron_mux.serve.dispatcher.view import JobView, TenantView


@dataclass(frozen=True)
class Turn:
    """A waiting job in its place. One that is `due` is not delayed any more by whoever comes after it."""

    job: JobView
    due: bool


@dataclass(frozen=True)
class Scene:
    """What else the order of the queue depends on.

    Attributes:
        shares: What each tenant was given, by its weight; what its running jobs will take counts ahead.
        last_start: When a job was last started, by tenant and backbone.
        present: Backbones that instances have.
    """

    tenants: Mapping[str, TenantView]
    shares: Mapping[str, float]
    last_start: Mapping[tuple[str, str], float]
    present: Collection[str]
    now: float


@dataclass(frozen=True)
class Policy(ABC):
    """What both policies have in common. Times are seconds.

    Attributes:
        rates: How fast jobs train together.
        jobs_per_instance: The most jobs of one instance.
        patience: Who waits longer is due. Also what one step of `JobView.priority` outweighs (`Fair`).
        turn: A job is left on its instance at least this long before it may be asked to leave for one that is due.
        hold: An instance is given up no sooner than this after it was launched, and a job that no instance has the
            backbone of is due after this already. A slot changes its backbone at most once in this time.
        idle: An instance has to have been without jobs for this long before its slot is given to another backbone.
        leave: What it takes to save a job and have it leave; for predictions only.
        slack: By which part of the time that the first in the queue is predicted to wait others may prolong it.
    """

    rates: Rates = field(default_factory=Rates)
    jobs_per_instance: int = 32
    patience: float = 3600.0
    turn: float = 1800.0
    hold: float = 600.0
    idle: float = 60.0
    leave: float = 10.0
    slack: float = 0.1

    takes_turns = False
    """Whether jobs are asked to leave for one that is due."""

    @abstractmethod
    def queue(self, waiting: Sequence[JobView], scene: Scene) -> list[Turn]:
        """Put waiting jobs, given in the order of arrival, into the order in which they get room."""

    @abstractmethod
    def choose(self, job: JobView, rooms: Sequence[Room], now: float) -> Room:
        """Choose one of some instances which a job could begin on, or could once they are ready."""

    def gains(self, job: JobView, room: Room) -> bool:
        """Whether an instance gains by a job that is not due."""
        return True

    def limit(self, backbone: str, present: Collection[str]) -> float:
        """After how many seconds of waiting a job is due."""
        return self.patience if backbone in present else min(self.hold, self.patience)


class Fifo(Policy):
    """First come first served with filling up (MuxTune, section 5.4): EASY backfilling by predicted memory.

    Jobs get room in the order of arrival, each on the ready instance that has fewest jobs. The first that finds none
    (for each backbone) reserves the instance where it is predicted to start soonest; later jobs may start anywhere if
    that does not delay its predicted start. In an engine whose jobs step together every start delays every neighbour:
    on the reserved instance a delay of `slack` times the predicted wait is allowed until the first one is due, that is,
    has waited for `patience`. From then on nobody begins there. If no instance has the backbone of a job that is due,
    nobody begins on one of another backbone until that is empty and gives up its slot; nobody is asked to leave.
    """

    def queue(self, waiting: Sequence[JobView], scene: Scene) -> list[Turn]:
        """See `Policy`."""
        return [
            Turn(job, scene.now - job.since >= self.limit(job.backbone, scene.present)) for job in waiting
        ]

    def choose(self, job: JobView, rooms: Sequence[Room], now: float) -> Room:
        """See `Policy`."""
        return min(rooms, key=lambda room: (not room.ready, len(room.jobs), room.slot))


@dataclass(frozen=True)
class Fair(Policy):
    """Weighted fairness between tenants, and what a job slows down against what it gains.

    - Between tenants: whoever was given least by its weight is next (`accounts`).
    - Within a tenant: in the order of arrival, where a step of priority counts as `patience` earlier, and a deadline
      that can still be met but not after much more waiting as `urgent` steps. So no job is overtaken for ever.
    - Where: the instance, ready or starting, that least delays all in sum: until the job has finished there, and what
      it adds to the steps of its neighbours for as long as both train. A job waits for an instance that starts if it
      finishes sooner so, and joins others only if an instance's training as a whole gains `least_gain` by it.
    - The first that finds no room reserves as with `Fifo`.

    Ageing. The jobs of one tenant for one backbone are a queue. A queue that had no start for `patience` (`hold` if no
    instance has the backbone) is due, those that wait longest first: its first job comes before all that are not due
    and asks jobs to leave that have been on an instance for `turn`, of tenants that were given more. And a job never
    overtakes one of its own queue that has waited for `patience`.

    Theorem: a queue never stands still for longer than B = patience + (Q + 1) * (D + L), and a job waits at most
    (k + 1) * B if k others of its queue start meanwhile; once it has waited for `patience`, these are only jobs ahead
    of it, which as priorities and deadlines are bounded arrived no later than a bounded time after it. Q is how many
    other queues have jobs that wait, D the longest that a job is on an instance, L = hold + leave + load, what a slot
    takes to change its backbone. Assumed: the job fits into an empty instance, its tenant is below its limit of running
    jobs, predictions are right, decisions are made whenever something happens and once the times above are over, and
    meanwhile no instance dies, no job is in suspicion and the first job of a due queue stays the first. Why: due queues
    are served in turn, since a start makes a queue the last of them; nobody begins on the instance that a due job has
    reserved, and everybody there, or on the one that gives its slot to the backbone, has ended or left after D + L.
    For a queue whose tenant has no job running and was given least, `turn` takes the place of D.

    Attributes:
        least_gain: Part by which an instance's training has to gain; jobs that are due need not.
        urgent: Steps of priority that a deadline counts for while `stretch` times the rest of the job reaches past it.
        stretch: How much slower than alone a job is assumed to train.
    """

    least_gain: float = 0.0
    urgent: int = 10
    stretch: float = 3.0

    takes_turns = True

    def queue(self, waiting: Sequence[JobView], scene: Scene) -> list[Turn]:
        """See `Policy`."""
        own: dict[str, list[JobView]] = defaultdict(list)
        for job in sorted(waiting, key=lambda job: self.place(job, scene.now)):
            own[job.tenant].append(job)
        due = self._due([job for jobs in own.values() for job in jobs], scene)
        shares = dict(scene.shares)

        def charge(job: JobView) -> float:
            shares[job.tenant] += min(job.cost, CREDIT) / scene.tenants[job.tenant].weight
            return shares[job.tenant]

        for job in due:
            charge(job)
            own[job.tenant].remove(job)
        order = [Turn(job, True) for job in due]
        heap = [(shares[name], jobs[0].number, name, 0) for name, jobs in own.items() if jobs]
        heapq.heapify(heap)
        while heap:
            _, _, name, index = heapq.heappop(heap)
            order.append(Turn(own[name][index], False))
            share = charge(own[name][index])
            if index + 1 < len(own[name]):
                heapq.heappush(heap, (share, own[name][index + 1].number, name, index + 1))
        return order

    def place(self, job: JobView, now: float) -> tuple[float, int]:
        """Where a job stands among its tenant's: the lower, the sooner."""
        priority = job.priority
        if job.deadline is not None and job.cost <= job.deadline - now <= self.stretch * job.cost:
            priority += self.urgent
        return (job.submitted_at - self.patience * priority, job.number)

    def choose(self, job: JobView, rooms: Sequence[Room], now: float) -> Room:
        """See `Policy`."""

        def delays(room: Room) -> float:
            before, after = room.joint_step(self.rates, job)
            others = sum([left if left < steps else steps for left in room.steps])
            return max(room.ready_at - now, 0.0) + steps * after + others * (after - before)

        steps = job.steps

        return min(rooms, key=lambda room: (delays(room), not room.ready, room.slot))

    def gains(self, job: JobView, room: Room) -> bool:
        """See `Policy`."""
        before, after = room.throughput(self.rates, job)
        return after >= before * (1 + self.least_gain) - 1e-9

    def _due(self, jobs: Sequence[JobView], scene: Scene) -> list[JobView]:
        """The first jobs of the queues that are due; `jobs` are in the order of their tenants."""
        queues: dict[tuple[str, str], list[JobView]] = defaultdict(list)
        for job in jobs:
            queues[job.tenant, job.backbone].append(job)
        due: list[tuple[float, int, JobView]] = []
        for (tenant, backbone), queue in queues.items():
            last = scene.last_start.get((tenant, backbone), -math.inf)
            clock = max(last, min(job.since for job in queue))
            if scene.now - clock >= self.limit(backbone, scene.present):
                due.append((clock, queue[0].number, queue[0]))
        return [job for _, _, job in sorted(due, key=lambda entry: entry[:2])]
