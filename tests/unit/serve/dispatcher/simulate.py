"""A service in simulated time: jobs arrive, train, finish, and end instances, as `plan` decides.

Jobs of an instance step together as `Rates` says, each step is saved, and nothing is random but what `workload` draws
from its seed.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_mux.serve.dispatcher.accounts import Accounts
from megatron_mux.serve.dispatcher.decide import Plan, plan
from megatron_mux.serve.dispatcher.decisions import Decision, Fail, Launch, Leave, Retire, Start, Wait
from megatron_mux.serve.dispatcher.policies import Policy
from megatron_mux.serve.dispatcher.rates import Rates
from megatron_mux.serve.dispatcher.suspects import blame
from megatron_mux.serve.dispatcher.view import (
    BackboneView,
    Cluster,
    InstanceView,
    JobView,
    SlotView,
    TenantView,
)


@dataclass(frozen=True)
class SimulatedJob:
    """A job that will arrive.

    Attributes:
        steps: In all.
        seconds: Of a step alone.
        kills_at: The step in which it ends its instance, each time that it gets there; None: never.
    """

    tenant: str
    arrives_at: float
    steps: int
    seconds: float
    bytes: int
    backbone: str = "a"
    priority: int = 0
    deadline: float | None = None
    kills_at: int | None = None


@dataclass
class Record:
    """What became of a job.

    Attributes:
        waits: From when to when it waited, each time.
        starts: When it started, each time.
        turns: How many jobs of its tenant and backbone started in each wait, itself included.
    """

    job: SimulatedJob
    view: JobView
    done: float = 0.0
    furthest: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    finished_at: float | None = None
    failed: str = ""
    predicted: tuple[float | None, float | None] | None = None

    def now(self) -> JobView:
        """What the dispatcher sees."""
        return (
            self.view
            if self.view.instance is None
            else replace(self.view, steps_left=self.job.steps - self.done)
        )


@dataclass
class _Instance:
    view: InstanceView
    ready_at: float
    jobs: list[Record] = field(default_factory=list)
    leaves: dict[str, float] = field(default_factory=dict)
    ends_at: float = math.inf
    at: float = 0.0


class Simulation:
    """Runs jobs to their ends.

    Args:
        capacity: Bytes of an instance.
        rates: How fast jobs really train together.
        tick: Decisions are made at least this often while jobs wait.
        predict: Note in records when jobs were predicted to begin and end, as soon as they had arrived.
        check: Called with the cluster and the plan, whenever decisions are made.

    Attributes:
        records: By job id, `job-0` the first.
        launches: When an instance was launched, and in which slot.
        deaths: When instances died.
        trained: Pieces of time and what each tenant was trained in them, in seconds alone.
        backlogged: Pieces of time and the tenants that had waiting jobs all along.
    """

    def __init__(
        self,
        jobs: Sequence[SimulatedJob],
        policy: Policy,
        slots: int = 1,
        backbones: Sequence[BackboneView] = (BackboneView("a"),),
        capacity: int = 100,
        rates: Rates | None = None,
        weights: Mapping[str, float] | None = None,
        tick: float = 60.0,
        predict: bool = False,
        check: Callable[[Cluster, Plan, float], None] = lambda *_: None,
    ) -> None:
        self.policy, self.capacity, self.tick, self.check = policy, capacity, tick, check
        self.rates = rates or policy.rates
        self.backbones = {backbone.name: backbone for backbone in backbones}
        self.slots = {number: SlotView(number) for number in range(slots)}
        self.now = 0.0
        self.records: dict[str, Record] = {}
        self.launches: list[tuple[float, int]] = []
        self.deaths: list[float] = []
        self.trained: list[tuple[float, float, Counter[str]]] = []
        self.backlogged: list[tuple[float, float, frozenset[str]]] = []
        self._weights, self._predict = weights or {}, predict
        self._arriving = sorted(jobs, key=lambda job: job.arrives_at)
        self._instances: dict[str, _Instance] = {}
        self._accounts = Accounts()
        self._last_start: dict[str, dict[str, float]] = defaultdict(dict)

    @property
    def open(self) -> list[Record]:
        """Jobs that have arrived and are not over."""
        return [
            record for record in self.records.values() if record.finished_at is None and not record.failed
        ]

    def run(self, until: float = math.inf) -> None:
        """Go on until all jobs are over, or until a time."""
        while (self._arriving or self.open) and self.now < until:
            while self._arriving and self._arriving[0].arrives_at <= self.now:
                self._arrive(self._arriving.pop(0))
            self._decide()
            self._pass(min(self._next_event(), until))

    def cluster(self) -> Cluster:
        """What the dispatcher sees now."""
        records = self.open
        weights = {record.job.tenant: self._weights.get(record.job.tenant, 1.0) for record in records}
        served = self._accounts.served(weights)
        return Cluster(
            [record.now() for record in records],
            [
                replace(
                    each.view,
                    free_bytes=self.capacity - sum(record.job.bytes for record in each.jobs),
                    idle_since=None if each.jobs else each.at,
                )
                for each in self._instances.values()
            ],
            [TenantView(name, weights[name], None, served[name], self._last_start[name]) for name in weights],
            list(self.slots.values()),
            [replace(backbone, capacity_bytes=self.capacity) for backbone in self.backbones.values()],
        )

    def _arrive(self, job: SimulatedJob) -> None:
        number = len(self.records)
        view = JobView(
            f"job-{number}",
            job.tenant,
            number,
            job.backbone,
            self.now,
            self.now,
            job.priority,
            job.deadline,
            need_bytes=job.bytes,
            seconds_per_step=job.seconds,
            steps_left=job.steps,
        )
        self.records[view.id] = Record(job, view, turns=[0])

    def _decide(self) -> None:
        cluster = self.cluster()
        new = self._predict and any(record.predicted is None for record in self.open)
        made = plan(cluster, self.policy, self.now, predict=new)
        self.check(cluster, made, self.now)
        for decision in made.decisions:
            self._apply(decision)
        for name, record in self.records.items():
            if record.predicted is None and name in made.forecasts:
                record.predicted = (made.forecasts[name].start, made.forecasts[name].end)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Start(name, instance):
                record = self.records[name]
                for other in self.open:
                    if other.view.instance is None and self._same_queue(other, record):
                        other.turns[-1] += 1
                record.waits.append((record.view.since, self.now))
                record.starts.append(self.now)
                record.view = replace(record.view, instance=instance, since=self.now)
                self._last_start[record.job.tenant][record.job.backbone] = self.now
                self._instances[instance].jobs.append(record)
            case Leave(name, instance):
                self.records[name].view = replace(self.records[name].view, leaving=True)
                self._instances[instance].leaves[name] = self.now + self.policy.leave
            case Launch(slot, backbone):
                name = f"{slot}.{len(self.launches)}"
                view = InstanceView(name, slot, backbone, "starting", self.now)
                ready = self.now + self.backbones[backbone].load_seconds
                self._instances[name] = _Instance(view, ready, at=self.now)
                self.launches.append((self.now, slot))
            case Retire(name):
                each = self._instances[name]
                each.view = replace(each.view, state="draining")
                each.ends_at = self.now + self.policy.leave
            case Fail(name, reason):
                self.records[name].failed = reason
            case Wait():
                pass

    @staticmethod
    def _same_queue(one: Record, other: Record) -> bool:
        return (one.job.tenant, one.job.backbone) == (other.job.tenant, other.job.backbone)

    def _stepping(self, each: _Instance) -> list[Record]:
        return [record for record in each.jobs if not record.view.leaving] if each.ends_at == math.inf else []

    def _joint_step(self, each: _Instance) -> float:
        seconds = [record.job.seconds for record in self._stepping(each)]
        return self.rates.joint_step(each.view.backbone, seconds)

    def _next_event(self) -> float:
        times = [self.now + self.tick] if self.open else []
        times += [job.arrives_at for job in self._arriving[:1]]
        for each in self._instances.values():
            times += [each.ready_at] if each.view.state == "starting" else []
            times += [each.ends_at, *each.leaves.values()]
            step = self._joint_step(each)
            for record in self._stepping(each):
                times.append(self.now + (self._goal(record) - record.done) * step)
        return max(min(times), self.now + 1e-6)

    @staticmethod
    def _goal(record: Record) -> float:
        """The steps after which something happens next with a job on an instance."""
        if record.job.kills_at is not None:
            return record.job.kills_at - 0.5
        return record.done + 1 - record.done % 1 if record.view.suspects else record.job.steps

    def _pass(self, at: float) -> None:
        """Let time pass in which nothing happens but steps, then let happen what is due."""
        trained: Counter[str] = Counter()
        waiting = frozenset(record.job.tenant for record in self.open if record.view.instance is None)
        for each in self._instances.values():
            step = self._joint_step(each)
            for record in self._stepping(each):
                record.done += (at - self.now) / step
                seconds = (at - self.now) / step * record.job.seconds
                trained[record.job.tenant] += seconds  # type: ignore[assignment]
                self._accounts.charge(record.job.tenant, seconds)
        self.trained.append((self.now, at, trained))
        self.backlogged.append((self.now, at, waiting))
        self.now = at
        for each in list(self._instances.values()):
            if each.view.state == "starting" and each.ready_at <= at + 1e-9:
                each.view = replace(each.view, state="ready")
            self._settle(each)

    def _settle(self, each: _Instance) -> None:
        """Let jobs of an instance finish or leave, and the instance end."""
        had = len(each.jobs)
        for record in list(each.jobs):
            self._progress(each, record)
            if record.done >= record.job.steps - 1e-6:
                record.finished_at = self.now
                each.jobs.remove(record)
            elif record.view.leaving and each.leaves[record.view.id] <= self.now + 1e-9:
                self._wait_again(record)
                each.jobs.remove(record)
        each.leaves = {name: at for name, at in each.leaves.items() if at > self.now + 1e-9}
        if had and not each.jobs:
            each.at = self.now
        dies = any(
            record.job.kills_at is not None and record.done >= record.job.kills_at - 0.5 - 1e-9
            for record in self._stepping(each)
        )
        if dies or each.ends_at <= self.now + 1e-9:
            self.end_instance(each.view.name, died=dies)

    def _progress(self, each: _Instance, record: Record) -> None:
        whole = math.floor(record.done + 1e-6)
        if whole > record.furthest:
            record.furthest = whole
            record.view = replace(record.view, suspects=0, lone_deaths=0)
            self.slots[each.view.slot] = SlotView(each.view.slot)

    def _wait_again(self, record: Record) -> None:
        record.done = float(math.floor(record.done + 1e-6))
        record.view = replace(record.now(), instance=None, leaving=False, since=self.now)
        record.turns.append(0)

    def end_instance(self, name: str, died: bool = True) -> None:
        """End an instance now; its jobs wait again, and are in suspicion if it died."""
        each = self._instances.pop(name)
        blamed = blame([record.view for record in each.jobs]) if died else {}
        for record in each.jobs:
            self._wait_again(record)
            suspects, lone = blamed.get(record.view.id, (record.view.suspects, record.view.lone_deaths))
            record.view = replace(record.view, suspects=suspects, lone_deaths=lone)
        if died:
            self.deaths.append(self.now)
            slot = self.slots[each.view.slot]
            self.slots[slot.number] = SlotView(slot.number, slot.deaths + 1, self.now)


def workload(
    seed: int,
    tenants: Mapping[str, int],
    arrivals_s: float,
    backbones: Sequence[str] = ("a",),
    mean_steps: float = 20.0,
) -> list[SimulatedJob]:
    """Draw jobs: lognormal steps with the sigma of MuxTune's trace, steps of 0.5 to 2 s, 5 to 40 bytes.

    Args:
        tenants: How many jobs each has.
        arrivals_s: They arrive at random times within so many seconds.
    """
    draw, sigma = random.Random(seed), 1.145
    mu = math.log(mean_steps) - sigma**2 / 2
    return [
        SimulatedJob(
            name,
            draw.uniform(0.0, arrivals_s),
            max(1, round(draw.lognormvariate(mu, sigma))),
            draw.uniform(0.5, 2.0),
            draw.randint(5, 40),
            draw.choice(list(backbones)),
        )
        for name, count in tenants.items()
        for _ in range(count)
    ]


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(share**2 for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def jain_of_windows(simulation: Simulation, window: float, weights: Mapping[str, float]) -> list[float]:
    """Jain's index of what tenants were trained by weight, in each window in which all had waiting jobs all along."""
    indices: list[float] = []
    pieces: dict[int, list[tuple[Counter[str], frozenset[str]]]] = defaultdict(list)
    for (begin, end, trained), (_, _, waiting) in zip(simulation.trained, simulation.backlogged, strict=True):
        pieces[int((begin + end) / 2 // window)].append((trained, waiting))
    for index in sorted(pieces)[1:-1]:
        if all(waiting >= weights.keys() for _, waiting in pieces[index]):
            total = sum((trained for trained, _ in pieces[index]), Counter[str]())
            indices.append(jain([total[name] / weight for name, weight in weights.items()]))
    return indices
