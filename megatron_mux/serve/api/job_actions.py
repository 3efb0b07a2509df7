"""What the API does with jobs: makes them, has their files checked, pauses, resumes and cancels them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from megatron_mux.serve.api.access import Caller, record
from megatron_mux.serve.api.errors import ApiError, faulty, missing, over_quota
from megatron_mux.serve.api.files import SECONDS_OF_RETRIES
from megatron_mux.serve.control.reports import OVER, add_event, end_lease, fail
from megatron_mux.serve.database.ids import new_id
from megatron_mux.serve.database.tables import Job, StoredFile
from megatron_mux.serve.jobs.fields import Fault, as_written, to_task
from megatron_mux.serve.jobs.requests import JobRequest, parse_request
from megatron_mux.serve.service import Checked, Service

_PAUSES = (1.0, 10.0)
"""Seconds before a check that broke down is tried again."""
_LOG = logging.getLogger(__name__)

Action = Literal["pause", "resume", "cancel"]


async def create_job(service: Service, caller: Caller, body: bytes) -> Job:
    """Make a job, or find the one that the same request has made if it is sent again.

    Equal requests of a tenant follow each other, so that one that is sent again while the first one is still checked
    finds its job.

    Raises:
        ApiError: 400: the request is faulty; 429: the tenant has too many jobs; 503: it could not be checked.
    """
    digest = hashlib.sha256(b"POST /v1/fine_tuning/jobs\n" + body).hexdigest()
    async with service.locks.setdefault(f"{caller.tenant_id} {digest}", asyncio.Lock()):
        if caller.retries:
            first = await asyncio.to_thread(_made_before, service, caller, digest)
            if first is not None:
                return first
        draft = await asyncio.to_thread(_draft, service, caller, body)
        try:
            backbone = service.settings.backbones[draft.request.model]
            faults = await service.checker.check_fields(backbone, draft.task)
        except Exception:
            _LOG.exception("a request for a job could not be checked")
            raise ApiError(503, "The request could not be checked: try again.", type="server_error") from None
        if faults:
            raise faulty(as_written(faults, draft.request))
        job = await asyncio.to_thread(_accept, service, caller, draft, digest)
    check_in_background(service, job.id)
    return job


def check_in_background(service: Service, job_id: str) -> None:
    """Have the files of a job checked. Called in the event loop."""
    task = asyncio.get_running_loop().create_task(_check(service, job_id), name=f"check {job_id}")
    service.checks.add(task)
    task.add_done_callback(service.checks.discard)


async def revalidate(service: Service) -> None:
    """Check the files of jobs that a server accepted which then ended. Called once at the start."""

    def left() -> list[str]:
        with service.store.read() as session:
            query = select(Job.id).where(Job.status == "validating_files").order_by(Job.number)
            return list(session.scalars(query))

    for job_id in await asyncio.to_thread(left):
        check_in_background(service, job_id)


async def stop_checks(service: Service) -> None:
    """End checks in the background; `revalidate` begins them anew."""
    checks = list(service.checks)
    for check in checks:
        check.cancel()
    await asyncio.gather(*checks, return_exceptions=True)


def change(service: Service, caller: Caller, job_id: str, action: Action) -> Job:
    """Pause, resume or cancel a job.

    One that is at an instance is told to leave; it has its new status once its instance has saved it.

    Raises:
        ApiError: 404: it is not the tenant's; 400: not from this state.
    """
    with service.store.write() as session:
        job = find_job(session, caller, job_id)
        wanted = "run" if action == "resume" else action
        if caller.retries and job.desired == wanted:
            return job
        if not _allows(job, action):
            state = "about to end" if _ends(job) else f"being {job.desired}d" if _leaves(job) else job.status
            raise ApiError(
                400,
                f"Job {job_id} is {state}: it cannot be {action}{'d' if action != 'cancel' else 'led'}.",
                "fine_tuning_job_id",
                "invalid_state",
            )
        job.desired = wanted
        record(session, caller, f"job.{action}", job.id)
        add_event(session, job, f"{action} requested")
        if job.instance is None and (job.status != "validating_files" or action == "cancel"):
            end_lease(session, job)
    service.wake()
    return job


def find_job(session: Session, caller: Caller, job_id: str, param: str = "fine_tuning_job_id") -> Job:
    """The tenant's job.

    Raises:
        ApiError: 404.
    """
    job = session.scalar(select(Job).where(Job.id == job_id, Job.tenant_id == caller.tenant_id))
    if job is None:
        raise missing("fine-tuning job", job_id, param)
    return job


@dataclass(frozen=True)
class _Draft:
    """A job that is not accepted yet."""

    id: str
    body: dict[str, Any]
    request: JobRequest
    task: dict[str, Any]
    answer: dict[str, Any]


def _made_before(service: Service, caller: Caller, digest: str) -> Job | None:
    query = select(Job).where(
        Job.tenant_id == caller.tenant_id,
        Job.request_hash == digest,
        Job.created_at > time.time() - SECONDS_OF_RETRIES,
    )
    with service.store.read() as session:
        return session.scalar(query.order_by(Job.number.desc()).limit(1))


def _draft(service: Service, caller: Caller, body: bytes) -> _Draft:
    """The task of a request.

    Raises:
        ApiError: 400, with all faults.
    """
    try:
        content = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.", code="invalid_json") from None
    request = parse_request(content)
    if not isinstance(request, JobRequest):
        raise faulty(request)
    faults = []
    if request.model not in service.settings.backbones:
        text = f"model: there is no {request.model!r} that can be tuned: see GET /v1/models"
        faults.append(Fault(text, "model", "model_not_found"))
    named = {"training_file": request.training_file, "validation_file": request.validation_file}
    paths: dict[str, Path] = {}
    with service.store.read() as session:
        for param, file_id in named.items():
            if file_id is None:
                continue
            paths[param] = service.settings.files / file_id
            if not _is_there(session, caller, file_id):
                text = f"{param}: there is no file {file_id!r} with the purpose fine-tune"
                faults.append(Fault(text, param, "file_not_found"))
    if faults:
        raise faulty(faults)
    seed = secrets.randbelow(2**31) if request.seed is None else request.seed
    job_id = new_id("ftjob")
    task, resolved = to_task(request, job_id, seed, paths["training_file"], paths.get("validation_file"))
    kind = request.method_type
    answer = {
        **named,
        "seed": seed,
        "suffix": request.suffix,
        "metadata": request.metadata,
        "hyperparameters": {name: value for name, value in resolved.items() if name != "beta"},
        "method": {"type": kind, kind: {"hyperparameters": resolved}},
    }
    return _Draft(job_id, content, request, task, answer)


def _is_there(session: Session, caller: Caller, file_id: str) -> bool:
    query = select(StoredFile.id).where(
        StoredFile.id == file_id, StoredFile.tenant_id == caller.tenant_id, StoredFile.purpose == "fine-tune"
    )
    return session.scalar(query) is not None


def _accept(service: Service, caller: Caller, draft: _Draft, digest: str) -> Job:
    """Commit a job. Nothing may fail afterwards: a client that gets 5xx sends its request again.

    Raises:
        ApiError: 400: a file has been deleted meanwhile; 429: the tenant has too many jobs.
    """
    job = Job(
        id=draft.id,
        tenant_id=caller.tenant_id,
        created_at=time.time(),
        backbone=draft.request.model,
        request=draft.body,
        request_hash=digest,
        task=draft.task,
        answer=draft.answer,
        priority=draft.request.priority,
    )
    open_jobs = select(func.count()).where(Job.tenant_id == caller.tenant_id, Job.status.not_in(OVER))
    with service.store.write() as session:
        if (session.scalar(open_jobs) or 0) >= caller.limits.open_jobs:
            raise over_quota(f"You have {caller.limits.open_jobs} jobs that are not over, which is the most.")
        for param in ("training_file", "validation_file"):
            file_id = draft.answer[param]
            if file_id is not None and not _is_there(session, caller, file_id):
                raise ApiError(400, f"{param}: {file_id} has been deleted.", param, "file_not_found")
        session.add(job)
        session.flush()  # gives it what columns have by default
        add_event(session, job, "the job is accepted; its files are being checked")
        record(session, caller, "job.create", job.id)
    _LOG.info("%s: accepted", job.id)
    return job


async def _check(service: Service, job_id: str) -> None:
    """Check a job's files, and have it wait for an instance or fail."""
    for pause in (*_PAUSES, None):
        try:
            if await _check_once(service, job_id):
                service.wake()
            return
        except Exception:
            _LOG.exception("%s: its files could not be checked", job_id)
            if pause is not None:
                await asyncio.sleep(pause)
    await asyncio.to_thread(_conclude, service, job_id, None)


async def _check_once(service: Service, job_id: str) -> bool:
    def read() -> tuple[str, dict[str, Any]]:
        with service.store.read() as session:
            job = session.scalars(select(Job).where(Job.id == job_id)).one()
            return job.backbone, job.task

    name, task = await asyncio.to_thread(read)
    backbone = service.settings.backbones.get(name)
    if backbone is None:  # the server has been started without it; another start may have it
        _LOG.warning("%s: waits, as this server does not have %s", job_id, name)
        return False
    checked = await service.checker.check_files(backbone, task)
    await asyncio.to_thread(_conclude, service, job_id, checked)
    return True


def _conclude(service: Service, job_id: str, checked: Checked | None) -> None:
    """Commit what a check has found; None: it broke down each time."""
    with service.store.write() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        if job.status != "validating_files":
            return  # cancelled meanwhile
        if checked is None:
            fail(session, job, "server_error", "its files could not be checked; the server's log says why")
        elif checked.faults:
            first = checked.faults[0]
            param = first.param if first.param in ("training_file", "validation_file") else "training_file"
            fail(session, job, f"invalid_{param}", "\n".join(fault.message for fault in checked.faults))
            job.error = {**(job.error or {}), "param": first.param or param}
        else:
            job.total_steps = checked.total_steps
            job.need = {"tokens": _tokens_of_step(job.task, checked)}
            for note in checked.notes:
                add_event(session, job, note, "warn")
            job.status = "paused" if job.desired == "pause" else "queued"
            add_event(session, job, f"the files are valid; the job is {job.status}")
    _LOG.info("%s: %s after its files were checked", job_id, job.status)


def _tokens_of_step(task: dict[str, Any], checked: Checked) -> float:
    training = task["training"]
    size = training["per_device_train_batch_size"] * training.get("gradient_accumulation_steps", 1)
    return checked.tokens / max(1, checked.records) * float(size)


def _allows(job: Job, action: Action) -> bool:
    if job.status in OVER or _ends(job) or job.desired == "cancel":
        return False
    if action == "resume":
        return job.desired == "pause"
    return action == "cancel" or job.desired == "run"


def _ends(job: Job) -> bool:
    """Whether a job has trained, and its results are being written."""
    return job.finished_at is not None and job.status not in OVER


def _leaves(job: Job) -> bool:
    return job.desired != "run" and job.status not in (*OVER, "paused")
