"""Decides which jobs start, leave, fail or wait, and which instances are launched and given up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_mux.serve.dispatcher.accounts import CREDIT
from megatron_mux.serve.dispatcher.decisions import Decision, Fail, Leave, Start, Wait
from megatron_mux.serve.dispatcher.forecast import Forecast, forecast
from megatron_mux.serve.dispatcher.policies import Policy, Scene, Turn
from megatron_mux.serve.dispatcher.room import Room
from megatron_mux.serve.dispatcher.slots import Slots, room_of
from megatron_mux.serve.dispatcher.suspects import LONE_DEATHS, needs_instance_alone
from megatron_mux.serve.dispatcher.view import BackboneView, Cluster, JobView, TenantView

_EXAMINED = 64
"""How many jobs are tried on an instance that an earlier one has reserved: bounds the time that a decision takes."""


@dataclass(frozen=True)
class Plan:
    """What is to be done now, and what is expected: forecasts of all jobs that are to run, by id."""

    decisions: list[Decision]
    forecasts: dict[str, Forecast]


def decide(cluster: Cluster, policy: Policy, now: float) -> list[Decision]:
    """Decide what is to be done; see `plan`."""
    return plan(cluster, policy, now).decisions


def plan(cluster: Cluster, policy: Policy, now: float, predict: bool = True) -> Plan:
    """Decide what is to be done now, and predict what becomes of each job unless `predict` is False.

    Each job that is to run and is on no instance gets exactly one of `Start`, `Wait` and `Fail`. Whoever carries the
    decisions out calls this again when anything has changed, and once a second while jobs wait.
    """
    return _Round(cluster, policy, now).plan(predict)


@dataclass
class _Reservation:
    """An instance that the first of a backbone's jobs without room will have, at the latest at `until`."""

    job: JobView
    room: Room
    until: float
    due: bool
    examined: int = 0


class _Round:
    """One round of decisions."""

    def __init__(self, cluster: Cluster, policy: Policy, now: float) -> None:
        self.policy, self.now = policy, now
        self.jobs = sorted(cluster.jobs, key=lambda job: job.number)
        self.backbones = {backbone.name: backbone for backbone in cluster.backbones}
        self.tenants = {job.tenant: TenantView(job.tenant) for job in self.jobs}
        self.tenants |= {tenant.id: tenant for tenant in cluster.tenants}
        self.rooms = [
            room_of(instance, self.backbones.get(instance.backbone, BackboneView("")), policy, now)
            for instance in sorted(cluster.instances, key=lambda instance: (instance.slot, instance.name))
            if instance.state != "draining"
        ]
        self.slots = Slots(cluster, policy, self.rooms, now)
        self.shares = {name: tenant.served / tenant.weight for name, tenant in self.tenants.items()}
        self.running: Counter[str] = Counter()
        self.last_start = {
            (name, backbone): at
            for name, tenant in self.tenants.items()
            for backbone, at in tenant.last_start.items()
        }
        self.decisions: list[Decision] = []
        self.reserved: dict[str, _Reservation] = {}
        rooms = {room.name: room for room in self.rooms}
        for job in self.jobs:
            if job.instance is not None:
                self._count(job)
                queue = (job.tenant, job.backbone)
                self.last_start[queue] = max(job.since, self.last_start.get(queue, 0.0))
                if room := rooms.get(job.instance):
                    room.hold(job)

    def plan(self, predict: bool) -> Plan:
        for job in self.jobs:
            if job.instance is not None and job.wants != "run" and not job.leaving:
                reason = "its tenant paused it" if job.wants == "pause" else "its tenant cancelled it"
                self.decisions.append(Leave(job.id, job.instance, reason))
                for room in self.rooms:
                    if job.id in room.jobs:
                        room.ask_to_leave(job)
        turns = self._turns(self._possible())
        self.slots.launch([turn.job for turn in turns])
        waits = self._dispatch(turns)
        queue = [turn.job for turn in turns if turn.job.id in waits]
        forecasts = self._forecasts(queue) if predict else {}
        waiting: list[Decision] = []
        before: Counter[str] = Counter()
        for job in queue:
            start = forecasts.get(job.id, Forecast()).start
            waiting.append(Wait(job.id, waits[job.id], start, before[job.backbone]))
            before[job.backbone] += 1
        return Plan([*self.decisions, *self.slots.decisions, *waiting], forecasts)

    def _forecasts(self, queue: Sequence[JobView]) -> dict[str, Forecast]:
        limits = {name: tenant.running_limit for name, tenant in self.tenants.items()}
        rooms = [*self.rooms, *self.slots.expected(queue)]
        return forecast(rooms, queue, limits, self.running, self.policy, self.now)

    def _possible(self) -> list[JobView]:
        """Jobs that wait, without those that cannot be run, which fail."""
        waiting = []
        for job in self.jobs:
            if job.wants == "run" and job.instance is None:
                if reason := self._impossible(job):
                    self.decisions.append(Fail(job.id, reason))
                else:
                    waiting.append(job)
        return waiting

    def _impossible(self, job: JobView) -> str:
        if job.lone_deaths >= LONE_DEATHS:
            return f"{job.lone_deaths} instances died while it was alone on them, without a step in between"
        capacity = self.backbones.get(job.backbone, BackboneView("")).capacity_bytes
        if capacity is not None and job.bytes > capacity:
            return f"it is predicted to need {_gib(job.bytes)}, and an instance without jobs has {_gib(capacity)} free"
        for room in self.rooms:
            if not room.jobs and job.id in room.refusals:
                return f"an instance without jobs has no room for it: {room.refusals[job.id]}"
        return ""

    def _turns(self, waiting: Sequence[JobView]) -> list[Turn]:
        """Put jobs in order. Those in suspicion come first: until they have done a step, others wait for them."""
        present = {room.backbone for room in self.rooms}
        scene = Scene(self.tenants, self.shares, self.last_start, present, self.now)
        suspects = [Turn(job, needs_instance_alone(job)) for job in waiting if job.suspects]
        return suspects + self.policy.queue([job for job in waiting if not job.suspects], scene)

    def _dispatch(self, turns: Sequence[Turn]) -> dict[str, str]:
        """Start whom there is room for; returns why the others wait, by id."""
        waits: dict[str, str] = {}
        closed: set[tuple[str, str]] = set()
        for turn in turns:
            job, queue = turn.job, (turn.job.tenant, turn.job.backbone)
            limit = self.tenants[job.tenant].running_limit
            if job.backbone not in self.backbones:
                reason = "the service does not have its backbone any more"
            elif limit is not None and self.running[job.tenant] >= limit:
                reason = f"its tenant's limit of running jobs is {limit}"
            elif queue in closed:
                reason = "an earlier job of its tenant has waited for long and starts first"
            else:
                reason = self._serve(turn)
                if reason and self.policy.takes_turns and self.now - job.since >= self.policy.patience:
                    closed.add(queue)
            if reason:
                waits[job.id] = reason
        return waits

    def _serve(self, turn: Turn) -> str:
        """Start a job if there is room; else say why it waits."""
        job = turn.job
        rooms = self._allowed(job)
        fitting = [room for room in rooms if room.fits(job)]
        free = [room for room in fitting if not self._is_kept(room, job)]
        gaining = (
            free if turn.due or job.suspects else [room for room in free if self.policy.gains(job, room)]
        )
        if gaining:
            return self._place(job, self.policy.choose(job, gaining, self.now))
        if job.backbone not in self.reserved:
            self._reserve(turn, rooms)
        due = {entry.room.name for entry in self.reserved.values() if entry.due}
        self.slots.give_up_for(turn, due)
        return self._why(job, rooms, bool(free), bool(fitting))

    def _allowed(self, job: JobView) -> list[Room]:
        """Instances to try a job on: one in suspicion joins jobs beyond suspicion only if there is no other way."""
        rooms = [room for room in self.rooms if room.backbone == job.backbone]
        if not job.suspects:
            return rooms
        clear = [room for room in rooms if len(room.suspects) == len(room.jobs)]
        if clear or self.slots.comes(job.backbone):
            return clear
        least = min((len(room.stepping) for room in rooms), default=0)
        return [room for room in rooms if len(room.stepping) == least]

    def _is_kept(self, room: Room, job: JobView) -> bool:
        """Whether an instance is reserved, and the start of a job would delay the one that reserved it."""
        entry = self.reserved.get(room.backbone)
        if entry is None or entry.room is not room:
            return False
        if entry.due or entry.examined >= _EXAMINED:
            return True
        entry.examined += 1
        room.add(job)
        delayed = room.earliest(entry.job, self.policy.rates, self.now) > entry.until
        room.remove(job)
        return delayed

    def _place(self, job: JobView, room: Room) -> str:
        """Start a job on an instance, or have it wait for one that starts."""
        room.add(job)
        self._count(job)
        if not room.ready:
            return "an instance with its backbone is starting"
        room.started = True
        self.decisions.append(Start(job.id, room.name, "there is room for it"))
        return ""

    def _reserve(self, turn: Turn, rooms: Sequence[Room]) -> None:
        """Reserve the instance where a job is predicted to have room first, and make room if its turn has come."""
        job = turn.job
        room = self._make_room(job, rooms) if turn.due else None
        times = [(each.earliest(job, self.policy.rates, self.now), each.slot, each) for each in rooms]
        if room is not None:
            times = [time for time in times if time[2] is room]
        if times:
            at, _, room = min(times, key=lambda time: time[:2])
            if at < math.inf:
                until = at + (0.0 if turn.due else self.policy.slack * (at - self.now)) + 1e-6
                self.reserved[job.backbone] = _Reservation(job, room, until, turn.due)

    def _make_room(self, job: JobView, rooms: Sequence[Room]) -> Room | None:
        """Ask jobs to leave for one whose turn has come, on the instance where these are fewest; returns that."""
        alone = needs_instance_alone(job)
        for room in rooms:
            if room.leaving and room.space_without(job, [room.jobs[name] for name in room.leaving]):
                return room
        if alone and any(room.suspects for room in rooms):
            return None  # these will have done a step, or have ended the instance, before long
        if not alone and not self.policy.takes_turns:
            return None
        choices = []
        for room in rooms:
            gone = [room.jobs[name] for name in room.leaving]
            victims = room.stepping if alone else self._victims(job, room)
            for count in range(1, len(victims) + 1):
                if room.ready and room.space_without(job, [*gone, *victims[:count]]):
                    choices.append((count, room.slot, room, victims[:count]))
                    break
        if not choices:
            return None
        _, _, room, victims = min(choices, key=lambda choice: choice[:2])
        for victim in victims:
            room.ask_to_leave(victim)
            reason = (
                "another job has to be alone for a moment" if alone else "the turn of another job has come"
            )
            self.decisions.append(Leave(victim.id, room.name, f"{reason}; it is saved and goes on later"))
        return room

    def _victims(self, job: JobView, room: Room) -> list[JobView]:
        """Jobs of an instance that may have to leave for another, those of tenants that were given most first."""
        shares, victims = dict(self.shares), []
        able = [
            other
            for other in room.stepping
            if self.now - other.since >= self.policy.turn and not other.suspects
        ]
        while able:
            victim = max(able, key=lambda other: (shares[other.tenant], other.number))
            able.remove(victim)
            shares[victim.tenant] -= self._charge(victim)
            if victim.tenant != job.tenant and shares[victim.tenant] >= self.shares[job.tenant] - 1e-6:
                victims.append(victim)
            else:
                shares[victim.tenant] += self._charge(victim)
        return victims

    def _why(self, job: JobView, rooms: Sequence[Room], gains_nothing: bool, kept: bool) -> str:
        """Why there is no room for a job."""
        if note := self.slots.notes.get(job.backbone):
            return note
        if not rooms:
            return (
                "instances are busy with other backbones: one gets its backbone when it is idle or by turns"
            )
        if job.suspects or not rooms:
            return "an instance died with it: it is tried again with fewer or no others"
        if gains_nothing:
            return "it would slow down the jobs of an instance by more than it gains"
        if kept:
            return "room is kept for a job that has waited for longer"
        if any(room.leaving for room in rooms):
            return "there is no room until jobs that are leaving have been saved"
        if all(len(room.jobs) >= room.most_jobs for room in rooms):
            return "the instances take no more jobs for now"
        most = max(room.free for room in rooms)
        if job.bytes > most:
            return (
                f"it is predicted to need {_gib(job.bytes)}, and no instance has more than {_gib(most)} free"
            )
        if not all(room.may_join(job) for room in rooms if room.free >= job.bytes):
            return "an instance died: jobs that were on it do a step before others begin"
        return "the instances have no room for it, as they found when it was to start"

    def _count(self, job: JobView) -> None:
        self.running[job.tenant] += 1
        self.shares[job.tenant] += self._charge(job)

    def _charge(self, job: JobView) -> float:
        return min(job.cost, CREDIT) / self.tenants[job.tenant].weight


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
