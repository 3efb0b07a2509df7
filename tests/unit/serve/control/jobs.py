"""A database with a tenant, an instance and a job that it has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sqlalchemy import select

from megatron_mux.serve.database.store import Store, sqlite_url
from megatron_mux.serve.database.tables import Event, Instance, Job, Metric, Tenant


def make_store(directory: Path) -> Store:
    directory.mkdir(parents=True, exist_ok=True)
    store = Store(sqlite_url(directory))
    with store.write() as session:
        session.add(Tenant(id="org-1", name="ann", created_at=0.0))
        session.add(instance("0.0"))
    return store


def instance(name: str, **fields: Any) -> Instance:
    usual: dict[str, Any] = {"slot": 0, "backbone": "tiny", "state": "ready", "token_hash": "", "handle": {}}
    return Instance(name=name, **{**usual, "started_at": time.time(), **fields})


def add_job(store: Store, name: str = "ftjob-1", **fields: Any) -> None:
    usual: dict[str, Any] = {
        "tenant_id": "org-1", "created_at": time.time(), "backbone": "tiny", "request": {}, "request_hash": "",
        "task": {"name": name}, "answer": {"suffix": None}, "status": "running", "attempt": 1, "instance": "0.0",
        "total_steps": 4,
    }  # fmt: skip
    with store.write() as session:
        session.add(Job(id=name, **{**usual, **fields}))


def get_job(store: Store, name: str = "ftjob-1") -> Job:
    with store.read() as session:
        return session.scalars(select(Job).where(Job.id == name)).one()


def messages(store: Store, kind: str = "message") -> list[str]:
    with store.read() as session:
        return list(session.scalars(select(Event.message).where(Event.type == kind).order_by(Event.number)))


def steps(store: Store) -> list[tuple[int, str]]:
    with store.read() as session:
        found = session.scalars(select(Metric).order_by(Metric.step, Metric.kind.desc()))
        return [(own.step, own.kind) for own in found]
