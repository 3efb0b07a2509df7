"""Routes of files."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import Select, func, select, tuple_
from sqlalchemy.orm import Session

from megatron_mux.files import sync_directory
from megatron_mux.serve.api.access import Caller, CallerOf, ServiceOf, record
from megatron_mux.serve.api.bodies import Received, check_reserve, receive_file, receiving
from megatron_mux.serve.api.errors import ApiError, missing, over_quota
from megatron_mux.serve.api.objects import file_object
from megatron_mux.serve.api.pages import After, page
from megatron_mux.serve.control.reports import OVER
from megatron_mux.serve.database.ids import new_id
from megatron_mux.serve.database.tables import Job, StoredFile
from megatron_mux.serve.service import Service

router = APIRouter()
_PURPOSE = "fine-tune"
_PARTIAL = ".partial-"
_AT_ONCE = 1 << 18
SECONDS_OF_RETRIES = 600
"""For how long a request that is sent again gets what the first one made."""


@router.post("/files")
async def upload(request: Request, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Store a file."""
    file_id = new_id("file")
    partial = partial_path(service, file_id)

    def check_before() -> None:
        check_reserve(service.settings)
        with service.store.read() as session:
            check_quota(session, caller, 1)

    await asyncio.to_thread(check_before)
    with receiving(service, caller):
        received = await receive_file(
            request, "file", partial, caller.limits.file_bytes, lambda: check_reserve(service.settings)
        )
    try:
        check_fields(received.fields, received.bytes)
        return file_object(await asyncio.to_thread(keep_file, service, caller, file_id, received))
    finally:
        await asyncio.to_thread(partial.unlink, missing_ok=True)


@router.get("/files")
def list_files(
    service: ServiceOf,
    caller: CallerOf,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """List the tenant's files, the newest one first."""
    key = tuple_(StoredFile.created_at, StoredFile.id)
    query = select(StoredFile).where(StoredFile.tenant_id == caller.tenant_id).limit(limit + 1)
    query = query.order_by(
        *(
            (StoredFile.created_at, StoredFile.id)
            if order == "asc"
            else (StoredFile.created_at.desc(), StoredFile.id.desc())
        )
    )
    if purpose is not None:
        query = query.where(StoredFile.purpose == purpose)
    with service.store.read() as session:
        if after is not None:
            last = find_file(session, caller, after, "after")
            known = (last.created_at, last.id)
            query = query.where(key > known if order == "asc" else key < known)
        return page(session.scalars(query).all(), limit, file_object)


@router.get("/files/{file_id}")
def retrieve(file_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Answer with a file's object."""
    with service.store.read() as session:
        return file_object(find_file(session, caller, file_id))


@router.get("/files/{file_id}/content")
def content(file_id: str, service: ServiceOf, caller: CallerOf) -> StreamingResponse:
    """Answer with what is in a file."""
    with service.store.read() as session:
        file = find_file(session, caller, file_id)
    try:
        opened = open(service.settings.files / file.id, "rb")  # noqa: SIM115 (_pieces closes it)
    except FileNotFoundError:  # it has been deleted just now
        raise missing("file", file_id, "file_id") from None
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=utf-8''{quote(file.filename)}",
    }
    return StreamingResponse(_pieces(opened), media_type="application/octet-stream", headers=headers)


@router.delete("/files/{file_id}")
def delete(file_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Delete a file that no job needs any more."""
    with service.store.write() as session:
        file = find_file(session, caller, file_id)
        jobs = select(Job).where(Job.tenant_id == caller.tenant_id, Job.status.not_in(OVER))
        for job in session.scalars(jobs):
            if file.id in (job.answer["training_file"], job.answer["validation_file"]):
                raise ApiError(
                    400, f"Job {job.id} needs this file: cancel it first.", "file_id", "file_in_use"
                )
        session.delete(file)
        record(session, caller, "file.delete", file.id)
    (service.settings.files / file.id).unlink(missing_ok=True)
    return {"id": file.id, "object": "file", "deleted": True}


def find_file(session: Session, caller: Caller, file_id: str, param: str = "file_id") -> StoredFile:
    """The tenant's file.

    Raises:
        ApiError: 404.
    """
    query = select(StoredFile).where(StoredFile.id == file_id, StoredFile.tenant_id == caller.tenant_id)
    file = session.scalar(query)
    if file is None:
        raise missing("file", file_id, param)
    return file


def check_quota(session: Session, caller: Caller, more: int) -> None:
    """Refuse one more file if the tenant may not have it.

    Raises:
        ApiError: 429.
    """
    query = select(func.count(), func.coalesce(func.sum(StoredFile.bytes), 0))
    count, stored = session.execute(query.where(StoredFile.tenant_id == caller.tenant_id)).one()
    if count >= caller.limits.files:
        raise over_quota(f"You have {count} files, which is the most: delete some.")
    if stored + more > caller.limits.stored_bytes:
        most = caller.limits.stored_bytes
        raise over_quota(
            f"Your files have {stored} bytes of {most}, and {more} more do not fit: delete some."
        )


def check_fields(fields: dict[str, str], size: int) -> None:
    """Check what comes with a file.

    Raises:
        ApiError: 400.
    """
    for name in fields.keys() - {"purpose"}:
        raise ApiError(400, f"{name[:64]}: unknown field.", name[:64], "unknown_parameter")
    check_purpose(fields.get("purpose"))
    if size == 0:
        raise ApiError(400, "file: is empty.", "file", "empty_file")


def check_purpose(purpose: str | None) -> None:
    """Refuse files that are not for fine-tuning, which this server has no use for.

    Raises:
        ApiError: 400.
    """
    if purpose != _PURPOSE:
        raise ApiError(400, f"purpose: must be '{_PURPOSE}'.", "purpose", "invalid_value")


def partial_path(service: Service, file_id: str) -> Path:
    """Where the content of a file is until it is complete."""
    return service.settings.files / f"{_PARTIAL}{file_id}"


def keep_file(service: Service, caller: Caller, file_id: str, received: Received) -> StoredFile:
    """Rename a complete file to its own name and add its row; or find what a request that is sent again has made.

    The content comes first: a row always has its file. `remove_leftovers` removes a file without a row.

    Raises:
        ApiError: 429: the tenant may not have it.
    """
    file = StoredFile(
        id=file_id,
        tenant_id=caller.tenant_id,
        created_at=time.time(),
        filename=received.filename,
        purpose=_PURPOSE,
        bytes=received.bytes,
        sha256=received.sha256,
    )
    path = service.settings.files / file_id
    os.replace(partial_path(service, file_id), path)
    sync_directory(path.parent)
    try:
        with service.store.write() as session:
            first = session.scalar(_same(file)) if caller.retries else None
            if first is not None:
                path.unlink()
                return first
            check_quota(session, caller, file.bytes)
            session.add(file)
            record(session, caller, "file.create", file.id)
    except ApiError:
        path.unlink()
        raise
    return file


def remove_leftovers(service: Service) -> None:
    """Remove files that a server left which was killed: partial ones, and complete ones without a row."""
    with service.store.read() as session:
        known = set(session.scalars(select(StoredFile.id)))
    for path in service.settings.files.glob("*"):
        if path.is_file() and path.name not in known:
            path.unlink()


def _same(file: StoredFile) -> Select[StoredFile]:
    return select(StoredFile).where(
        StoredFile.tenant_id == file.tenant_id,
        StoredFile.sha256 == file.sha256,
        StoredFile.filename == file.filename,
        StoredFile.purpose == file.purpose,
        StoredFile.created_at > file.created_at - SECONDS_OF_RETRIES,
    )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_AT_ONCE):
            yield piece
