"""What the dispatcher knows: jobs that are not over, instances, tenants. All times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

UNKNOWN_SECONDS = 1.0
"""A step of a job is assumed to take this long until its duration is predicted."""
UNKNOWN_STEPS = 100
"""A job is assumed to have this many steps left until its data have been counted."""


@dataclass(frozen=True)
class JobView:
    """A job that is checked and not over.

    Attributes:
        number: Its place in the order of arrival.
        submitted_at: When it arrived.
        since: When its instance admitted it; without one, when it began to wait. A start that is refused ends no wait.
        priority: Among its tenant's jobs; the larger, the sooner.
        deadline: When its tenant wants it finished.
        wants: What its tenant wants.
        instance: Where it is, from `Start` until the instance reports that it left.
        leaving: Its instance has been told that it is to leave.
        admitted: Its instance has reported that it trains, so `InstanceView.free_bytes` allows for it.
        need_bytes: Predicted on the fullest rank; None: unknown, and assumed to fit until an instance refuses it.
        seconds_per_step: Predicted or measured, if it trained alone.
        steps_left: Steps until it is finished.
        suspects: 0 once it has done a step further than any before its instance died; else see `suspects.blame`.
        lone_deaths: Instances that died with it alone, since its last such step.
    """

    id: str
    tenant: str
    number: int
    backbone: str
    submitted_at: float
    since: float
    priority: int = 0
    deadline: float | None = None
    wants: Literal["run", "pause", "cancel"] = "run"
    instance: str | None = None
    leaving: bool = False
    admitted: bool = True
    need_bytes: int | None = None
    seconds_per_step: float | None = None
    steps_left: float | None = None
    suspects: int = 0
    lone_deaths: int = 0

    @property
    def bytes(self) -> int:
        """Memory to count with."""
        return self.need_bytes or 0

    @property
    def seconds(self) -> float:
        """Of a step alone, to count with."""
        return UNKNOWN_SECONDS if self.seconds_per_step is None else self.seconds_per_step

    @property
    def steps(self) -> float:
        """Steps left, to count with."""
        return UNKNOWN_STEPS if self.steps_left is None else self.steps_left

    @property
    def cost(self) -> float:
        """Seconds that the rest of it would take alone."""
        return self.seconds * self.steps


@dataclass(frozen=True)
class InstanceView:
    """An instance that is not gone.

    Attributes:
        slot: Where it runs.
        started_at: When it was launched.
        free_bytes: Left on its fullest rank beside the jobs that it has admitted; None: it does not plan memory.
        idle_since: Since when it has had no job; None: it has one.
        refusals: Jobs that it refused since a job last left it, with its words.
    """

    name: str
    slot: int
    backbone: str
    state: Literal["starting", "ready", "draining"]
    started_at: float
    free_bytes: int | None = None
    idle_since: float | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotView:
    """A place for one instance.

    Attributes:
        deaths: Of its instances since a job last completed a step there.
        last_death_at: When the last of these died.
    """

    number: int
    deaths: int = 0
    last_death_at: float = 0.0


@dataclass(frozen=True)
class BackboneView:
    """A backbone that the service has.

    Attributes:
        capacity_bytes: The most that an instance has reported as free, which it has without jobs; None: not known yet.
            Jobs that need more fail.
        load_seconds: From launching an instance until it is ready.
        wanted: One instance is worth a free slot even without jobs, such as for chats.
    """

    name: str
    capacity_bytes: int | None = None
    load_seconds: float = 30.0
    wanted: bool = False


@dataclass(frozen=True)
class TenantView:
    """A tenant with jobs.

    Attributes:
        weight: Share of the instances, beside those of other tenants; above 0.
        running_limit: How many of its jobs may be on instances at once.
        served: What it has been given, in seconds of training alone; see `accounts.Accounts`.
        last_start: When one of its jobs was last started and not refused, by backbone; without, those of its queue that
            are running tell. It decides which queue has waited longest (`policies.Fair`).
    """

    id: str
    weight: float = 1.0
    running_limit: int | None = None
    served: float = 0.0
    last_start: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Everything that a decision is made from; the order within its sequences does not matter."""

    jobs: Sequence[JobView]
    instances: Sequence[InstanceView]
    tenants: Sequence[TenantView]
    slots: Sequence[SlotView]
    backbones: Sequence[BackboneView]
