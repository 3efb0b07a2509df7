"""Routes of models: backbones that can be tuned, and what the tenant's jobs have made of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from sqlalchemy import Select, select

from megatron_mux.serve.api.access import Caller, CallerOf, ServiceOf, record
from megatron_mux.serve.api.errors import ApiError, missing
from megatron_mux.serve.api.objects import model_object
from megatron_mux.serve.database.tables import Job

router = APIRouter(prefix="/models")


@router.get("")
def list_models(service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """List backbones and the tenant's models. The list has no pages, as OpenAI's."""
    with service.store.read() as session:
        tuned = [_tuned(job, caller) for job in session.scalars(_own(caller).order_by(Job.number))]
    bare = [_bare(name, service.started) for name in service.settings.backbones]
    return {"object": "list", "data": bare + tuned}


@router.get("/{model:path}")
def retrieve(model: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Answer with a model."""
    if model in service.settings.backbones:
        return _bare(model, service.started)
    with service.store.read() as session:
        job = session.scalar(_own(caller).where(Job.model == model))
    if job is None:
        raise missing("model", model, "model")
    return _tuned(job, caller)


@router.delete("/{model:path}")
def delete(model: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Delete a tuned model. Its job stays, and so do the job's result files."""
    if model in service.settings.backbones:
        raise ApiError(403, "Backbones are the server's: they cannot be deleted.", "model", "not_permitted")
    with service.store.write() as session:
        job = session.scalar(_own(caller).where(Job.model == model))
        if job is None:
            raise missing("model", model, "model")
        job.model = None
        record(session, caller, "model.delete", model)
    return {"id": model, "object": "model", "deleted": True}


def _own(caller: Caller) -> Select[Job]:
    return select(Job).where(
        Job.tenant_id == caller.tenant_id, Job.model.is_not(None), Job.status == "succeeded"
    )


def _bare(name: str, since: float) -> dict[str, Any]:
    return model_object(name, since, "megatron-mux")


def _tuned(job: Job, caller: Caller) -> dict[str, Any]:
    return model_object(str(job.model), job.finished_at or job.created_at, caller.tenant_name)
