"""The tables of a service: tenants and keys, files, jobs and what is known of them, instances.

Seconds since 1970 are floats, JSON columns hold what clients sent or get. What trains is not kept here: checkpoints are
files, and `Job.checkpoint` names the newest one that is complete.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

_ID = String(64)


class Table(DeclarativeBase):
    """The base of all tables."""

    type_annotation_map = {dict[str, Any]: JSON, list[Any]: JSON}


class Tenant(Table):
    """Whoever keys, files and jobs belong to; tenants see nothing of each other."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    created_at: Mapped[float]
    weight: Mapped[float] = mapped_column(default=1.0)
    """Share of the instances under the fair policy, beside those of others."""
    limits: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Its quotas where they differ from the service's."""


class Key(Table):
    """A key of a tenant. Only its hash is kept."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[float]
    expires_at: Mapped[float | None]
    revoked_at: Mapped[float | None]


class StoredFile(Table):
    """A file of a tenant: uploaded, or a result of a job. Its content is `files/ID` below the service's directory."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    created_at: Mapped[float]
    filename: Mapped[str] = mapped_column(String(255))
    purpose: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))


class Job(Table):
    """A fine-tuning job: what its client wants, where it trains, and how far it is."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_by_tenant", "tenant_id", "number"),
        Index("jobs_by_request", "tenant_id", "request_hash"),
    )

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """The order in which jobs came."""
    id: Mapped[str] = mapped_column(_ID, unique=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    created_at: Mapped[float]
    backbone: Mapped[str] = mapped_column(String(255))
    request: Mapped[dict[str, Any]]
    """The body that the client sent."""
    request_hash: Mapped[str] = mapped_column(String(64))
    task: Mapped[dict[str, Any]]
    """The task as `tasks.yaml` would say it, with files of the service."""
    answer: Mapped[dict[str, Any]]
    """What the API says of it and never changes: hyperparameters as resolved, method, seed, suffix, metadata, files."""

    desired: Mapped[str] = mapped_column(String(16), default="run")
    """What its tenant wants: `run`, `pause` or `cancel`."""
    status: Mapped[str] = mapped_column(String(32), default="validating_files")
    """OpenAI's: validating_files, queued, running, paused, succeeded, failed, cancelled."""
    reason: Mapped[str] = mapped_column(Text, default="")
    """Why it waits, in a sentence."""
    attempt: Mapped[int] = mapped_column(default=0)
    """How often it has been given to an instance. With `instance` the lease: who reports another one is refused."""
    instance: Mapped[str | None] = mapped_column(String(64))
    """Where it is; None: nowhere."""

    step: Mapped[int] = mapped_column(default=0)
    """Steps whose metrics are kept."""
    saved_step: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int | None]
    checkpoint: Mapped[str] = mapped_column(Text, default="")
    """Directory of its newest complete checkpoint, below the service's; empty: it has none."""
    trained_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    need: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """What it is predicted to take: `bytes` on the fullest rank, `seconds` a step. Empty: not known yet."""
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    estimated_start: Mapped[float | None]
    estimated_finish: Mapped[float | None]
    error: Mapped[dict[str, Any] | None]
    model: Mapped[str | None] = mapped_column(String(255))
    result_files: Mapped[list[Any]] = mapped_column(default=list)
    priority: Mapped[int] = mapped_column(default=0)
    deadline: Mapped[float | None]
    since: Mapped[float] = mapped_column(default=0.0)
    """When it came to its instance; without one, when it began to wait."""
    suspects: Mapped[int] = mapped_column(default=0)
    lone_deaths: Mapped[int] = mapped_column(default=0)
    """See `dispatcher.suspects`."""


class Event(Table):
    """What happened to a job, for its tenant."""

    __tablename__ = "events"
    __table_args__ = (Index("events_by_job", "job_id", "number"),)

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_at: Mapped[float]
    level: Mapped[str] = mapped_column(String(8))
    type: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    data: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Metric(Table):
    """A line of a job's metrics: a step or an evaluation after it. A later attempt replaces what it does again."""

    __tablename__ = "metrics"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(8), primary_key=True)
    """`train` or `eval`."""
    values: Mapped[dict[str, Any]]


class Checkpoint(Table):
    """A checkpoint of a job that its tenant can load."""

    __tablename__ = "checkpoints"

    id: Mapped[str] = mapped_column(_ID, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    created_at: Mapped[float]
    step: Mapped[int]
    path: Mapped[str] = mapped_column(Text)


class Instance(Table):
    """An engine that has been started: a group of processes that shares one backbone."""

    __tablename__ = "instances"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Its slot and how often that was started before: `0.3`."""
    slot: Mapped[int]
    backbone: Mapped[str] = mapped_column(String(255))
    state: Mapped[str] = mapped_column(String(16))
    """`starting`, `ready`, `draining`, `gone`."""
    token_hash: Mapped[str] = mapped_column(String(64))
    handle: Mapped[dict[str, Any]]
    """By which the executor finds its processes again."""
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    last_report: Mapped[int] = mapped_column(default=0)
    """The number of the last report that was committed."""
    reason: Mapped[str] = mapped_column(Text, default="")


class Audit(Table):
    """Who did what, for the operator."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    created_at: Mapped[float]
    tenant_id: Mapped[str] = mapped_column(_ID)
    key_id: Mapped[str] = mapped_column(_ID)
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(String(255))
