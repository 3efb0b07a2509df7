"""Commits what instances report about jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from megatron_mux.serve.channel.messages import AnyReport, Lines, Saved, State
from megatron_mux.serve.channel.run_files import new_lines, newest_save
from megatron_mux.serve.database.ids import new_id
from megatron_mux.serve.database.store import Store
from megatron_mux.serve.database.tables import Checkpoint, Event, Instance, Job, Metric

OVER = ("succeeded", "failed", "cancelled")
"""Statuses after which nothing is done for a job."""
_AFTER_LEAVING: Mapping[str, str] = {"run": "queued", "pause": "paused", "cancel": "cancelled"}


def add_event(
    session: Session, job: Job, message: str, level: str = "info", data: dict[str, Any] | None = None
) -> None:
    """Tell a job's tenant something; with `data`, figures of a step."""
    kind = "message" if data is None else "metrics"
    session.add(
        Event(job_id=job.id, created_at=time.time(), level=level, type=kind, message=message, data=data or {})
    )


def end_lease(session: Session, job: Job, reason: str = "") -> None:
    """A job is at no instance any more: what follows is what its tenant wants."""
    if job.status == "running":  # else it has not been admitted, and has waited all the time
        job.since = time.time()
    job.instance = None
    job.status = _AFTER_LEAVING[job.desired]
    job.reason = reason
    if job.status == "cancelled":
        job.finished_at = time.time()
    add_event(session, job, f"the job is {job.status}" + (f": {reason}" if reason else ""))


def fail(session: Session, job: Job, code: str, message: str) -> None:
    """A job cannot go on."""
    job.instance, job.status, job.reason = None, "failed", ""
    job.finished_at = time.time()
    job.error = {"code": code, "message": message, "param": None}
    add_event(session, job, f"the job has failed: {message}", "error")


@dataclass
class JobRecords:
    """The records of instances and their jobs; see `channel.hub.Records`.

    Attributes:
        store: The database.
        root: Directory of the service.
        no_room: Told which instance has no room for which job, and why.
    """

    store: Store
    root: Path
    no_room: Callable[[str, str, str], None] = lambda instance, job, reason: None

    def token_hash(self, instance: str) -> str | None:
        """See `Records`."""
        with self.store.read() as session:
            own = session.get(Instance, instance)
            return None if own is None or own.state == "gone" else own.token_hash

    def last_report(self, instance: str) -> int:
        """See `Records`."""
        with self.store.read() as session:
            return session.get_one(Instance, instance).last_report

    def commit(self, instance: str, reports: Sequence[AnyReport]) -> None:
        """See `Records`. Reports that were committed before, and those of another attempt, change nothing."""
        with self.store.write() as session:
            own = session.get_one(Instance, instance)
            for report in reports:
                if report.number <= own.last_report:
                    continue
                own.last_report = report.number
                job = _leased(session, report.job, report.attempt, instance)
                if job is None:
                    continue
                if isinstance(report, State) and report.state == "no_room":
                    self.no_room(instance, job.id, report.reason)
                self._apply(session, job, report)

    def _apply(self, session: Session, job: Job, report: AnyReport) -> None:
        match report:
            case State():
                _change_state(session, job, report)
            case Lines(lines=lines):
                add_metrics(session, job, lines)
            case Saved():
                add_save(session, job, report.step, report.checkpoint, report.status, report.reason)

    def collect(self, session: Session, job: Job, directory: Path) -> None:
        """Take over what an instance that is gone has left of a job and not reported.

        Args:
            session: A writing one.
            job: At that instance by its lease.
            directory: Of the instance's run.
        """
        task = f"{job.id}.{job.attempt}"
        for lines, _ in new_lines(directory, task, 0):
            add_metrics(session, job, lines)
        saved = newest_save(directory)[1].get(task)
        if saved is not None and saved.checkpoint is not None and saved.step >= job.saved_step:
            checkpoint = str(saved.checkpoint.resolve().relative_to(self.root.resolve()))
            add_save(session, job, saved.step, checkpoint, saved.status, saved.reason)


def _leased(session: Session, job_id: str, attempt: int, instance: str) -> Job | None:
    """The job, if this attempt of it is at this instance."""
    return session.scalars(
        select(Job).where(Job.id == job_id, Job.attempt == attempt, Job.instance == instance)
    ).one_or_none()


def _change_state(session: Session, job: Job, report: State) -> None:
    match report.state:
        case "running":
            if job.status != "running":
                job.since = time.time()
                add_event(session, job, "the job is running")
            job.status, job.reason = "running", ""
            job.started_at = job.started_at or time.time()
        case "parked":
            add_event(
                session, job, "it ran out of memory beside others, and goes on once one has left", "warn"
            )
        case "no_room":
            end_lease(session, job, report.reason)
        case "refused":
            fail(session, job, "refused", report.reason)
        case "removed":
            end_lease(session, job)


def add_metrics(session: Session, job: Job, lines: Sequence[Mapping[str, Any]]) -> None:
    """Keep lines of a job's metrics, each step once: what is done again replaces what was there."""
    steps = [int(line["step"]) for line in lines]
    if not steps:
        return
    found = session.scalars(
        select(Metric).where(Metric.job_id == job.id, Metric.step.between(min(steps), max(steps)))
    )
    known = {(own.step, own.kind): own for own in found}
    for line in lines:
        step, kind = int(line["step"]), "train" if "loss" in line else "eval"
        values = {key: value for key, value in line.items() if key not in ("step", "wall_s")}
        before = known.get((step, kind))
        if before is not None:
            before.values = values
            continue
        known[step, kind] = Metric(job_id=job.id, step=step, kind=kind, values=values)
        session.add(known[step, kind])
        if kind == "train":
            job.trained_tokens += int(values.get("tokens", 0))
        add_event(session, job, _sentence(job, step, values), data=_figures(job, step, values))
        if step > job.step:
            job.step, job.suspects, job.lone_deaths = step, 0, 0


def add_save(session: Session, job: Job, step: int, checkpoint: str, status: str, reason: str) -> None:
    """Keep that a job has a complete checkpoint; it is over, or leaves, if the save says so."""
    if checkpoint and checkpoint != job.checkpoint:
        job.checkpoint, job.saved_step = checkpoint, step
        session.add(
            Checkpoint(id=new_id("ftckpt"), job_id=job.id, created_at=time.time(), step=step, path=checkpoint)
        )
    match status:
        case "finished":  # its results are written next (control.results)
            job.instance, job.finished_at, job.reason = None, time.time(), "its results are being written"
        case "failed":
            fail(session, job, "diverged", reason)
        case "removed":
            end_lease(session, job)


def _sentence(job: Job, step: int, values: Mapping[str, Any]) -> str:
    whole = f"/{job.total_steps}" if job.total_steps else ""
    figures = [f"{key.replace('_', ' ')}={value:.4g}" for key, value in values.items() if key in _SHOWN]
    return f"Step {step}{whole}: {', '.join(figures)}"


_SHOWN = ("loss", "eval_loss", "eval_accuracy")


def _figures(job: Job, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A step's figures by OpenAI's names, and the others by ours."""
    named = {
        "loss": "train_loss",
        "eval_loss": "full_valid_loss",
        "eval_token_accuracy": "full_valid_mean_token_accuracy",
    }
    figures = {named.get(key, key): value for key, value in values.items()}
    return {"step": step, "total_steps": job.total_steps, **figures}


def model_name(job: Job, tenant_name: str) -> str:
    """The name of the model that a job makes: as OpenAI's, with a part of the job's id."""
    return f"ft:{job.backbone}:{tenant_name}:{job.answer['suffix'] or ''}:{job.id.rpartition('-')[2][:8]}"
