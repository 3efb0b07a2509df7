"""An instance while decisions are made: what it holds, what fits, and when there will be room."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_mux.serve.dispatcher.rates import Rates
from megatron_mux.serve.dispatcher.suspects import may_join, needs_instance_alone
from megatron_mux.serve.dispatcher.view import JobView


@dataclass
class Room:
    """An instance that is ready or starts, with the jobs that it has or is to get.

    Attributes:
        ready_at: When it will be ready; in the past once it is.
        free: Bytes beside its jobs; infinite if unknown.
        most_jobs: That it takes.
        leave: Seconds that it takes a job to leave.
        leaving: Ids of jobs that are going to leave.
        stepping: The jobs that go on.
        steps: That these have left.
        suspects: The jobs in suspicion.
        started: A job has been started here by these decisions.
    """

    name: str
    slot: int
    backbone: str
    ready: bool
    ready_at: float
    started_at: float
    free: float
    most_jobs: int
    leave: float
    idle_since: float | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)
    jobs: dict[str, JobView] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    started: bool = False

    def __post_init__(self) -> None:
        self._step: float | None
        self._changed()

    def hold(self, job: JobView) -> None:
        """Note a job that the instance has."""
        self.jobs[job.id] = job
        if not job.admitted:
            self.free -= job.bytes
        if job.leaving:
            self.leaving.add(job.id)
        self._changed()

    def add(self, job: JobView) -> None:
        """Give it a job."""
        self.jobs[job.id] = job
        self.free -= job.bytes
        self._changed()

    def remove(self, job: JobView) -> None:
        """Take a job away."""
        del self.jobs[job.id]
        self.free += job.bytes
        self._changed()

    def ask_to_leave(self, job: JobView) -> None:
        """Note that a job is going to leave."""
        self.leaving.add(job.id)
        self._changed()

    def joint_step(self, rates: Rates, more: JobView) -> tuple[float, float]:
        """Seconds of a step of its jobs, and of one with one more."""
        if self._step is None:
            self._step = rates.joint_step(self.backbone, self._seconds)
        return self._step, rates.joint_step(self.backbone, [*self._seconds, more.seconds])

    def throughput(self, rates: Rates, more: JobView) -> tuple[float, float]:
        """Seconds alone that it trains in a second, and with one more job."""
        before, after = self.joint_step(rates, more)
        total = sum(self._seconds)
        return (total / before if before else 0.0), ((total + more.seconds) / after if after else 0.0)

    def fits(self, job: JobView) -> bool:
        """Whether a job may begin here, once the instance is ready."""
        return (
            self._has_space(job, self.free, len(self.jobs))
            and job.id not in self.refusals
            and self.may_join(job)
        )

    def may_join(self, job: JobView) -> bool:
        """Whether suspicion allows a job to begin here."""
        return may_join(job, self.suspects, len(self.jobs) - len(self.suspects))

    def space_without(self, job: JobView, gone: Collection[JobView]) -> bool:
        """Whether there is memory for a job once others have left."""
        return self._has_space(
            job, self.free + sum(other.bytes for other in gone), len(self.jobs) - len(gone)
        )

    def earliest(self, job: JobView, rates: Rates, now: float) -> float:
        """When there is predicted to be room for a job if nobody else begins here; infinite: never.

        Suspicion among the jobs here is taken to end with their next step.
        """
        at, free, count = max(now, self.ready_at), self.free, len(self.jobs)
        if job.id not in self.refusals and self._has_space(job, free, count):
            return at if self.may_join(job) else at + rates.joint_step(self.backbone, self._seconds)
        if self.leaving:
            at, count = at + self.leave, len(self.stepping)
            free += sum(self.jobs[name].bytes for name in self.leaving)
            if self._has_space(job, free, count):
                return at
        for seconds, other in departures(
            self.backbone, [(each.steps, each) for each in self.stepping], rates
        ):
            free, count = free + other.bytes, count - 1
            if self._has_space(job, free, count):
                return at + seconds
        return math.inf

    def _has_space(self, job: JobView, free: float, count: int) -> bool:
        return job.bytes <= free and (count == 0 if needs_instance_alone(job) else count < self.most_jobs)

    def _changed(self) -> None:
        self.stepping = [job for job in self.jobs.values() if job.id not in self.leaving]
        self.suspects = [job for job in self.jobs.values() if job.suspects]
        self.steps = [job.steps for job in self.stepping]
        self._seconds = [job.seconds for job in self.stepping]
        self._step = None


def departures(
    backbone: str, left: Sequence[tuple[float, JobView]], rates: Rates
) -> list[tuple[float, JobView]]:
    """When jobs will have finished that step together: seconds from now.

    Args:
        left: The jobs, each with the steps that it has left. As all step together, whoever has fewest is first.
    """
    order = sorted(left, key=lambda entry: (entry[0], entry[1].number))
    seconds = [job.seconds for _, job in order]
    at, done = 0.0, 0.0
    result: list[tuple[float, JobView]] = []
    for index, (steps, job) in enumerate(order):
        if steps > done:
            at += (steps - done) * rates.joint_step(backbone, seconds[index:])
            done = steps
        result.append((at, job))
    return result
