"""What the control loop remembers of instances, jobs and tenants beside the database, and the views made of both.

All of it is found out anew after a restart: refusals are repeated, shares begin level.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

from sqlalchemy import select
from sqlalchemy.orm import Session

from megatron_mux.serve.channel.hub import Peer
from megatron_mux.serve.database.tables import Instance, Job, Tenant
from megatron_mux.serve.dispatcher.accounts import Accounts
from megatron_mux.serve.dispatcher.view import (
    BackboneView,
    Cluster,
    InstanceView,
    JobView,
    SlotView,
    TenantView,
)
from megatron_mux.serve.settings import Settings

OPEN = ("queued", "running")
"""Statuses of jobs that the dispatcher looks at."""
_FIRST_RATE = 1000.0
"""Tokens a second of a backbone, until its jobs have trained."""
_SECONDS_WANTED = 600.0
"""So long after a chat its backbone stays at hand."""
_NEWER = 0.2
"""Share of the newest rate in the average."""


@dataclass
class _Seen:
    """An instance as it was seen last.

    Attributes:
        heard_at: When a message came from it, by the monotonic clock.
        jobs: By id, the steps that they had done.
        tokens: Trained by its jobs.
        refusals: See `InstanceView`.
    """

    heard_at: float = field(default_factory=time.monotonic)
    at: float = field(default_factory=time.time)
    jobs: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    idle_since: float | None = field(default_factory=time.time)
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass
class Observed:
    """Follows what instances do, turn by turn.

    Attributes:
        settings: Of the service.
        leaving: Jobs and attempts that have been told to leave.
        slots: What has happened in each slot.
    """

    settings: Settings
    leaving: set[tuple[str, int]] = field(default_factory=set)
    slots: dict[int, SlotView] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)
    _rates: dict[str, float] = field(default_factory=dict)
    _capacity: dict[str, int] = field(default_factory=dict)
    _load_seconds: dict[str, float] = field(default_factory=dict)
    _accounts: Accounts = field(default_factory=Accounts)
    _last_starts: dict[str, dict[str, float]] = field(default_factory=dict)
    _wanted_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = {number: SlotView(number) for number in range(self.settings.instances)}

    def heard(self, instance: str, peer: Peer | None) -> float:
        """Seconds since an instance was heard; from now on, if it is seen for the first time."""
        seen = self._seen.setdefault(instance, _Seen())
        if peer is not None:
            seen.heard_at = max(seen.heard_at, peer.heard_at)
        return time.monotonic() - seen.heard_at

    def refused(self, instance: str, job: str, reason: str) -> None:
        """Note that an instance had no room for a job."""
        self._seen.setdefault(instance, _Seen()).refusals[job] = reason

    def started(self, job: Job) -> None:
        """Note that a job has been given to an instance: tenants take turns."""
        self._last_starts.setdefault(job.tenant_id, {})[job.backbone] = time.time()

    def want(self, backbone: str) -> None:
        """Note that a chat asks for a backbone. Any thread may call it."""
        self._wanted_at[backbone] = time.monotonic()

    def died(self, instance: Instance) -> None:
        """Note that an instance has died, so that its slot waits longer each time."""
        before = self.slots[instance.slot]
        self.slots[instance.slot] = SlotView(before.number, before.deaths + 1, time.time())

    def forget(self, instance: str) -> None:
        """Forget an instance that is gone."""
        self._seen.pop(instance, None)

    def became_ready(self, instance: Instance) -> None:
        """Note how long a backbone took to be loaded."""
        self._load_seconds[instance.backbone] = time.time() - instance.started_at

    def cluster(self, session: Session, instances: Sequence[Instance], peers: Mapping[str, Peer]) -> Cluster:
        """What the dispatcher is to decide from."""
        jobs = session.scalars(select(Job).where(Job.status.in_(OPEN), Job.finished_at.is_(None))).all()
        for instance in instances:
            self._follow(instance, [job for job in jobs if job.instance == instance.name])
        views = [self.job(job) for job in jobs]
        return Cluster(
            views,
            [self._instance(own, peers.get(own.name)) for own in instances],
            self._tenants(session, views),
            list(self.slots.values()),
            [
                BackboneView(
                    name, self._capacity.get(name), self._load_seconds.get(name, 30.0), self._is_wanted(name)
                )
                for name in self.settings.backbones
            ],
        )

    def _is_wanted(self, backbone: str) -> bool:
        at = self._wanted_at.get(backbone)
        return at is not None and time.monotonic() - at < _SECONDS_WANTED

    def _follow(self, instance: Instance, jobs: Sequence[Job]) -> None:
        """Compare an instance's jobs with what they were in the last turn."""
        seen, now = self._seen.setdefault(instance.name, _Seen()), time.time()
        if seen.jobs.keys() - {job.id for job in jobs}:
            seen.refusals.clear()  # there is more room than there was
        trained = 0
        for job in jobs:
            steps = job.step - seen.jobs.get(job.id, job.step)
            tokens = job.trained_tokens - seen.tokens.get(job.id, job.trained_tokens)
            trained += tokens
            if steps > 0:
                self._accounts.charge(job.tenant_id, steps * self._seconds(job))
                self.slots[instance.slot] = SlotView(instance.slot)
        if trained > 0:
            rate = trained / max(now - seen.at, 1e-3)
            before = self._rates.get(instance.backbone, rate)
            self._rates[instance.backbone] = before + _NEWER * (rate - before)
        if trained > 0 or not jobs:
            seen.at = now
        seen.jobs = {job.id: job.step for job in jobs}
        seen.tokens = {job.id: job.trained_tokens for job in jobs}
        seen.idle_since = None if jobs else (seen.idle_since or now)

    def _seconds(self, job: Job) -> float:
        """A step's seconds: its tokens at the rate of the backbone's jobs together."""
        rate = self._rates.get(job.backbone, _FIRST_RATE)
        return float(job.need.get("tokens", _FIRST_RATE)) / rate

    def job(self, job: Job) -> JobView:
        """The dispatcher's view of a job."""
        left = None if job.total_steps is None else float(max(0, job.total_steps - job.step))
        return JobView(
            id=job.id,
            tenant=job.tenant_id,
            number=job.number,
            backbone=job.backbone,
            submitted_at=job.created_at,
            since=job.since or job.created_at,
            priority=job.priority,
            deadline=job.deadline,
            wants=cast(Literal["run", "pause", "cancel"], job.desired),
            instance=job.instance,
            leaving=(job.id, job.attempt) in self.leaving,
            admitted=job.status == "running",
            need_bytes=job.need.get("bytes"),
            seconds_per_step=self._seconds(job),
            steps_left=left,
            suspects=job.suspects,
            lone_deaths=job.lone_deaths,
        )

    def _instance(self, instance: Instance, peer: Peer | None) -> InstanceView:
        seen = self._seen[instance.name]
        free = None if peer is None else peer.free_bytes
        is_silent = instance.state == "ready" and peer is None
        if free is not None and seen.idle_since is not None:
            # A beat may be older than the leaving of the last job: too little would fail jobs that fit.
            self._capacity[instance.backbone] = max(free, self._capacity.get(instance.backbone, 0))
        return InstanceView(
            name=instance.name,
            slot=instance.slot,
            backbone=instance.backbone,
            # It gets no jobs while it is silent.
            state=cast(Literal["starting", "ready", "draining"], "starting" if is_silent else instance.state),
            started_at=instance.started_at,
            free_bytes=free,
            # It is not given up while it answers.
            idle_since=None if peer is not None and peer.completions else seen.idle_since,
            refusals=dict(seen.refusals),
        )

    def _tenants(self, session: Session, jobs: Iterable[JobView]) -> list[TenantView]:
        names = sorted({job.tenant for job in jobs})
        tenants = session.scalars(select(Tenant).where(Tenant.id.in_(names))).all()
        served = self._accounts.served({own.id: own.weight for own in tenants})
        limit = self.settings.limits.running_jobs
        return [
            TenantView(
                own.id,
                own.weight,
                own.limits.get("running_jobs", limit),
                served[own.id],
                dict(self._last_starts.get(own.id, {})),
            )
            for own in tenants
        ]
