"""Routes of fine-tuning jobs."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, Request
from sqlalchemy import Select, or_, select

from megatron_mux.serve.api.access import CallerOf, ServiceOf
from megatron_mux.serve.api.bodies import read_body
from megatron_mux.serve.api.errors import ApiError, missing
from megatron_mux.serve.api.job_actions import change, create_job, find_job
from megatron_mux.serve.api.objects import checkpoint_object, event_object, job_object
from megatron_mux.serve.api.pages import After, Limit, page
from megatron_mux.serve.control.reports import model_name
from megatron_mux.serve.database.tables import Checkpoint, Event, Job, Metric

router = APIRouter(prefix="/fine_tuning/jobs")
_FILTER = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_MOST_FILTERS = 16
"""As many as a job may have entries; a database takes so many terms, and no more than it has a bound for."""


@router.post("")
async def create(request: Request, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Make a job."""
    body = await read_body(request, caller.limits.body_bytes)
    return job_object(await create_job(service, caller, body))


@router.get("")
def list_jobs(
    request: Request, service: ServiceOf, caller: CallerOf, after: After = None, limit: Limit = 20
) -> dict[str, Any]:
    """List the tenant's jobs, the newest one first."""
    query = select(Job).where(Job.tenant_id == caller.tenant_id).order_by(Job.number.desc()).limit(limit + 1)
    filters = [item for item in request.query_params.multi_items() if item[0].startswith("metadata")]
    if len(filters) > _MOST_FILTERS:
        raise ApiError(400, f"metadata: a job has at most {_MOST_FILTERS} entries.", "metadata")
    for name, value in filters:
        query = _filtered(query, name, value)
    with service.store.read() as session:
        if after is not None:
            query = query.where(Job.number < find_job(session, caller, after, "after").number)
        return page(session.scalars(query).all(), limit, job_object)


@router.get("/{job_id}")
def retrieve(job_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Answer with a job."""
    with service.store.read() as session:
        return job_object(find_job(session, caller, job_id))


@router.post("/{job_id}/cancel")
def cancel(job_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """End a job for good."""
    return job_object(change(service, caller, job_id, "cancel"))


@router.post("/{job_id}/pause")
def pause(job_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Have a job saved, and leave its instance until it is resumed."""
    return job_object(change(service, caller, job_id, "pause"))


@router.post("/{job_id}/resume")
def resume(job_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Have a job that was paused go on."""
    return job_object(change(service, caller, job_id, "resume"))


@router.get("/{job_id}/events")
def events(
    job_id: str, service: ServiceOf, caller: CallerOf, after: After = None, limit: Limit = 20
) -> dict[str, Any]:
    """List what has happened to a job, the newest first."""
    with service.store.read() as session:
        job = find_job(session, caller, job_id)
        query = select(Event).where(Event.job_id == job.id).order_by(Event.number.desc()).limit(limit + 1)
        if after is not None:
            number = after.removeprefix("ftevent-")
            if not re.fullmatch("[0-9]{1,18}", number):
                raise missing("event", after, "after")
            query = query.where(Event.number < int(number))
        return page(session.scalars(query).all(), limit, event_object)


@router.get("/{job_id}/checkpoints")
def checkpoints(
    job_id: str, service: ServiceOf, caller: CallerOf, after: After = None, limit: Limit = 10
) -> dict[str, Any]:
    """List the checkpoints of a job, the newest one first."""
    with service.store.read() as session:
        job = find_job(session, caller, job_id)
        query = select(Checkpoint).where(Checkpoint.job_id == job.id).limit(limit + 1)
        query = query.order_by(Checkpoint.step.desc())
        if after is not None:
            last = session.get(Checkpoint, after)
            if last is None or last.job_id != job.id:
                raise missing("checkpoint", after, "after")
            query = query.where(Checkpoint.step < last.step)
        rows = session.scalars(query).all()
        steps = [row.step for row in rows]
        metrics = session.scalars(select(Metric).where(Metric.job_id == job.id, Metric.step.in_(steps)))
        values = {(metric.step, metric.kind): metric.values for metric in metrics}
    model = job.model or model_name(job, caller.tenant_name)

    def show(row: Checkpoint) -> dict[str, Any]:
        train, evaluated = values.get((row.step, "train"), {}), values.get((row.step, "eval"), {})
        return checkpoint_object(row, model, train, evaluated)

    return page(rows, limit, show)


def _filtered(query: Select[Job], name: str, value: str) -> Select[Job]:
    """A list's query with one of its parameters, if that is a filter by metadata.

    Raises:
        ApiError: 400: a key that databases cannot look up.
    """
    metadata = Job.answer["metadata"]
    if name == "metadata" and value == "null":
        return query.where(or_(metadata.as_string().is_(None), metadata.as_string() == "null"))
    key = _FILTER.fullmatch(name)
    if key is None:
        return query
    if '"' in key[1] or "\\" in key[1]:
        raise ApiError(400, "metadata: cannot be filtered by keys with quotes or backslashes.", "metadata")
    return query.where(metadata[key[1]].as_string() == value)
