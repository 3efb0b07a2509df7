"""Which backbone each slot has: instances are launched, and given up for another backbone, but never back and forth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from megatron_mux.serve.dispatcher.decisions import Launch, Retire
from megatron_mux.serve.dispatcher.policies import Policy, Turn
from megatron_mux.serve.dispatcher.room import Room
from megatron_mux.serve.dispatcher.view import BackboneView, Cluster, InstanceView, JobView, SlotView

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0


def free_at(slot: SlotView) -> float:
    """When an instance may be launched in a slot: 1 s after the first death there, doubling up to 60 s.

    Starts anew once a job has completed a step there (`SlotView.deaths` is 0 then).
    """
    if not slot.deaths:
        return -math.inf
    return slot.last_death_at + min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(slot.deaths - 1, 10))


class Slots:
    """Launches instances in free slots, and gives up those that another backbone should have the slot of.

    A backbone may have as many instances as it has jobs. One that has jobs but no instance is served first.

    Args:
        rooms: Instances to start jobs on; those launched are added, those given up are removed.

    Attributes:
        notes: Why the jobs of a backbone have to wait for an instance that is going to be launched.
    """

    def __init__(self, cluster: Cluster, policy: Policy, rooms: list[Room], now: float) -> None:
        self.decisions: list[Launch | Retire] = []
        self.notes: dict[str, str] = {}
        self._policy, self._rooms, self._now = policy, rooms, now
        self._backbones = {backbone.name: backbone for backbone in cluster.backbones}
        self._jobs = Counter(job.backbone for job in cluster.jobs if job.wants == "run")
        self._idle = Counter(
            job.backbone for job in cluster.jobs if job.wants == "run" and job.instance is None
        )
        used = {instance.slot for instance in cluster.instances}
        free = [slot for slot in cluster.slots if slot.number not in used]
        self._free = sorted(free, key=lambda slot: (max(free_at(slot), now), slot.deaths, slot.number))
        self._ending = sum(instance.state == "draining" for instance in cluster.instances)
        self._count = Counter(room.backbone for room in rooms)
        self._coming: Counter[str] = Counter()
        self._ready_at: dict[str, float] = {}

    def launch(self, waiting: Sequence[JobView]) -> None:
        """Launch instances for waiting jobs, in their order, and for backbones that are wanted anyway."""
        named = list(dict.fromkeys(job.backbone for job in waiting if job.backbone in self._backbones))
        for backbone in named:
            if not self._count[backbone]:
                self._take_slot(backbone, "jobs wait for its backbone")
        for backbone in named:
            while self._wants_more(backbone) and self._take_slot(backbone, "more jobs wait for its backbone"):
                pass
        for backbone in sorted(self._backbones):
            if self._backbones[backbone].wanted and not self._count[backbone] + self._coming[backbone]:
                idle = self._spare(backbone)
                if not self._take_slot(backbone, "its backbone is to be at hand") and idle:
                    self._retire(idle[0], backbone, "it has been idle, and another backbone is to be at hand")

    def give_up_for(self, turn: Turn, reserved: Collection[str]) -> None:
        """Give up an instance of another backbone for a job that finds no room, if one is idle or the job is due.

        Args:
            reserved: Names of instances that jobs wait for which are due and come before.
        """
        backbone = turn.job.backbone
        if not self._wants_more(backbone):
            return
        if idle := self._spare(backbone):
            self._retire(idle[0], backbone, "it has been idle, and jobs wait for another backbone")
        elif turn.due and not self._count[backbone] + self._coming[backbone]:
            busy = [
                room
                for room in self._old(backbone)
                if not room.started and room.name not in reserved and not room.suspects
            ]
            if busy:
                room = min(busy, key=lambda room: (-self._count[room.backbone], len(room.jobs), room.slot))
                if self._policy.takes_turns or not room.jobs:
                    self._retire(room, backbone, "jobs for another backbone have waited for their turn")
                else:
                    room.most_jobs = 0  # nobody begins here until it is without jobs

    def _old(self, backbone: str) -> list[Room]:
        """Instances of other backbones that have been there for a while."""
        return [
            room
            for room in self._rooms
            if room.backbone != backbone and room.ready and self._now - room.started_at >= self._policy.hold
        ]

    def _spare(self, backbone: str) -> list[Room]:
        """Those of them that nobody needs; first the one that has been idle for longest."""
        idle = [room for room in self._old(backbone) if not room.jobs and self._is_spare(room)]
        return sorted(idle, key=lambda room: (room.idle_since or 0.0, room.slot))

    def comes(self, backbone: str) -> bool:
        """Whether an instance is going to be launched as soon as its slot is free."""
        return self._coming[backbone] > 0

    def expected(self, waiting: Sequence[JobView]) -> list[Room]:
        """Instances that jobs can be predicted to get whose backbone no instance has."""
        rooms: list[Room] = []
        for backbone in dict.fromkeys(job.backbone for job in waiting):
            if backbone not in self._backbones or self._count[backbone]:
                continue
            at = self._ready_at.get(backbone)
            if at is None:
                due = min(job.since for job in waiting if job.backbone == backbone) + self._policy.hold
                given_up = [max(due, room.started_at + self._policy.hold) for room in self._rooms]
                at = max(min(given_up, default=math.inf), self._now) + self._policy.leave
                at += self._backbones[backbone].load_seconds
            rooms.append(new_room(f"to come: {backbone}", -1, self._backbones[backbone], self._policy, at))
        return rooms

    def _wants_more(self, backbone: str) -> bool:
        return self._jobs[backbone] > self._count[backbone] + self._coming[backbone]

    def _take_slot(self, backbone: str, reason: str) -> bool:
        """Launch an instance, or set a slot aside that will be free; returns whether there was one."""
        load = self._backbones[backbone].load_seconds
        if self._free:
            slot = self._free.pop(0)
            wait = free_at(slot) - self._now
            if wait <= 0:
                self.decisions.append(Launch(slot.number, backbone, reason))
                name = f"launched in {slot.number}"
                at = self._now + load
                self._rooms.append(new_room(name, slot.number, self._backbones[backbone], self._policy, at))
                self._count[backbone] += 1
                return True
            delay = free_at(slot) - slot.last_death_at
            note = f"an instance died and is started again {delay:.0f} s later"
        elif self._ending:
            self._ending -= 1
            wait = self._policy.leave
            note = "an instance ends, and one with its backbone is launched in its place"
        else:
            return False
        self._coming[backbone] += 1
        self.notes.setdefault(backbone, note)
        self._ready_at.setdefault(backbone, self._now + wait + load)
        return True

    def _is_spare(self, room: Room) -> bool:
        """Whether nobody needs an instance without jobs."""
        kept = self._backbones.get(room.backbone)
        return (
            room.idle_since is not None
            and self._now - room.idle_since >= self._policy.idle
            and not self._idle[room.backbone]
            and not (kept is not None and kept.wanted and self._count[room.backbone] == 1)
        )

    def _retire(self, room: Room, backbone: str, reason: str) -> None:
        self._rooms.remove(room)
        self._count[room.backbone] -= 1
        self.decisions.append(Retire(room.name, reason))
        self._ending += 1
        self._take_slot(backbone, "")


def new_room(name: str, slot: int, backbone: BackboneView, policy: Policy, ready_at: float) -> Room:
    """An instance without jobs that will be ready."""
    free = math.inf if backbone.capacity_bytes is None else float(backbone.capacity_bytes)
    return Room(
        name, slot, backbone.name, False, ready_at, ready_at, free, policy.jobs_per_instance, policy.leave
    )


def room_of(instance: InstanceView, backbone: BackboneView, policy: Policy, now: float) -> Room:
    """An instance as it is, without its jobs; its free bytes allow for those that it has admitted."""
    ready = instance.state == "ready"
    at = now if ready else max(now, instance.started_at + backbone.load_seconds)
    room = new_room(instance.name, instance.slot, backbone, policy, at)
    room.ready, room.started_at = ready, instance.started_at
    room.idle_since, room.refusals = instance.idle_since, instance.refusals
    if ready:
        room.free = math.inf if instance.free_bytes is None else float(instance.free_bytes)
    return room
