"""Routes of uploads: files that come in parts.

An upload is a directory, with its description and its parts, below the tenant's own until it expires: it ends with its
file, so that the database has nothing of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from megatron_mux.files import write_atomically
from megatron_mux.serve.api.access import Caller, CallerOf, ServiceOf
from megatron_mux.serve.api.bodies import (
    Received,
    check_reserve,
    plain_filename,
    read_json,
    receive_file,
    receiving,
    too_large,
)
from megatron_mux.serve.api.errors import ApiError, missing, over_quota
from megatron_mux.serve.api.files import check_purpose, check_quota, find_file, keep_file, partial_path
from megatron_mux.serve.api.objects import file_object
from megatron_mux.serve.database.ids import new_id
from megatron_mux.serve.database.tables import StoredFile
from megatron_mux.serve.service import Service

router = APIRouter(prefix="/uploads")
_SECONDS_TO_LIVE = 3600
_MOST_PARTS = 1000
_MOST_PENDING = 20
"""Of a tenant."""
_LARGEST_PART = 64 * 2**20
_AT_ONCE = 1 << 20


class _Create(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    filename: Annotated[str, Field(min_length=1, max_length=255)]
    bytes: Annotated[int, Field(ge=1)]
    purpose: Annotated[str, Field(max_length=64)]
    mime_type: Annotated[str, Field(max_length=255)] = ""


class _Complete(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    part_ids: Annotated[
        list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=_MOST_PARTS)
    ]
    md5: Annotated[str, Field(max_length=32)] | None = None


class _Upload(BaseModel):
    """The description of an upload, in its directory."""

    id: str
    file_id: str
    created_at: float
    filename: str
    purpose: str
    bytes: int
    status: Literal["pending", "completed", "cancelled"] = "pending"

    def shown(self, file: StoredFile | None = None) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            **self.model_dump(exclude={"file_id"}),
            "object": "upload",
            "created_at": int(self.created_at),
            "expires_at": int(self.created_at) + _SECONDS_TO_LIVE,
            "file": None if file is None else file_object(file),
        }


@router.post("")
async def create(request: Request, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Begin an upload."""
    asked = await read_json(request, _Create, caller.limits.body_bytes)
    check_purpose(asked.purpose)
    if asked.bytes > caller.limits.file_bytes:
        raise too_large("The file", caller.limits.file_bytes)

    def begin() -> dict[str, Any]:
        check_reserve(service.settings)
        remove_expired(service)
        pending = [own for own in _all(service, caller) if own.status == "pending"]
        if len(pending) >= _MOST_PENDING:
            raise over_quota(f"{len(pending)} uploads are not complete: complete or cancel some.")
        with service.store.read() as session:
            check_quota(session, caller, asked.bytes + sum(own.bytes for own in pending))
        upload = _Upload(
            id=new_id("upload"),
            file_id=new_id("file"),
            created_at=time.time(),
            filename=plain_filename(asked.filename),
            purpose=asked.purpose,
            bytes=asked.bytes,
        )
        _write(service, caller, upload)
        return upload.shown()

    return await asyncio.to_thread(begin)


@router.post("/{upload_id}/parts")
async def add_part(upload_id: str, request: Request, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Store a part."""
    upload = await asyncio.to_thread(_pending, service, caller, upload_id)
    directory = _directory(service, caller) / upload.id

    def left() -> int:
        sizes = [path.stat().st_size for path in directory.glob("part-*")]
        if len(sizes) >= _MOST_PARTS:
            raise ApiError(400, f"An upload has at most {_MOST_PARTS} parts.", "upload_id", "too_many_parts")
        return min(_LARGEST_PART, upload.bytes - sum(sizes))

    part_id = new_id("part")
    partial = directory / f".partial-{part_id}"
    with receiving(service, caller):
        most = await asyncio.to_thread(left)
        await receive_file(request, "data", partial, most, lambda: check_reserve(service.settings))
    try:
        await asyncio.to_thread(os.rename, partial, directory / part_id)
    except FileNotFoundError:
        raise _over(upload_id, "over") from None
    return {
        "id": part_id,
        "object": "upload.part",
        "created_at": int(time.time()),
        "upload_id": upload.id,
    }


@router.post("/{upload_id}/complete")
async def complete(upload_id: str, request: Request, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """Make a file of the parts. Done once: asked again, it answers the same."""
    asked = await read_json(request, _Complete, caller.limits.body_bytes)
    async with service.locks.setdefault(upload_id, asyncio.Lock()):
        return await asyncio.to_thread(_complete, service, caller, upload_id, asked)


@router.post("/{upload_id}/cancel")
async def cancel(upload_id: str, service: ServiceOf, caller: CallerOf) -> dict[str, Any]:
    """End an upload without a file."""

    def end() -> dict[str, Any]:
        upload = _find(service, caller, upload_id)
        if upload.status == "completed" or (upload.status == "cancelled" and not caller.retries):
            raise _over(upload_id, upload.status)
        return _end(service, caller, upload, "cancelled").shown()

    async with service.locks.setdefault(upload_id, asyncio.Lock()):
        return await asyncio.to_thread(end)


def remove_expired(service: Service) -> None:
    """Remove uploads that have expired, of all tenants."""
    for directory in service.settings.state.glob("uploads/*/upload-*"):
        if directory.stat().st_mtime < time.time() - 2 * _SECONDS_TO_LIVE:
            shutil.rmtree(directory, ignore_errors=True)


def _complete(service: Service, caller: Caller, upload_id: str, asked: _Complete) -> dict[str, Any]:
    upload = _find(service, caller, upload_id)
    if upload.status == "completed":
        with service.store.read() as session:
            return upload.shown(find_file(session, caller, upload.file_id))
    upload = _pending(service, caller, upload_id)
    check_reserve(service.settings)
    partial = partial_path(service, upload.file_id)
    try:
        sha256 = _join(_directory(service, caller) / upload.id, upload, asked, partial)
        received = Received({}, upload.filename, upload.bytes, sha256)
        file = keep_file(service, caller, upload.file_id, received)
    finally:
        partial.unlink(missing_ok=True)
    upload = upload.model_copy(update={"file_id": file.id})
    return _end(service, caller, upload, "completed").shown(file)


def _join(directory: Path, upload: _Upload, asked: _Complete, path: Path) -> str:
    """Write the parts one after the other; returns the SHA-256 of all.

    Raises:
        ApiError: 400: a part is missing, or they are not what the client announced.
    """
    parts = [directory / part for part in asked.part_ids]
    for number, part in enumerate(parts):
        if not re.fullmatch("part-[0-9a-f]+", part.name) or not part.is_file():
            raise ApiError(
                400, f"part_ids: there is no part {part.name!r}.", f"part_ids.{number}", "not_found"
            )
    size = sum(part.stat().st_size for part in parts)
    if size != upload.bytes:
        text = f"The parts have {size} bytes, but {upload.bytes} were announced."
        raise ApiError(400, text, "part_ids", "wrong_size")
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        for part in parts:
            with open(part, "rb") as source:
                while piece := source.read(_AT_ONCE):
                    sha256.update(piece)
                    md5.update(piece)
                    file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if asked.md5 is not None and asked.md5.lower() != md5.hexdigest():
        raise ApiError(400, "md5: is not that of the parts.", "md5", "wrong_checksum")
    return sha256.hexdigest()


def _directory(service: Service, caller: Caller) -> Path:
    return service.settings.state / "uploads" / caller.tenant_id


def _all(service: Service, caller: Caller) -> list[_Upload]:
    paths = _directory(service, caller).glob("upload-*/upload.json")
    found = [_Upload.model_validate_json(path.read_bytes()) for path in paths]
    return [own for own in found if own.created_at > time.time() - _SECONDS_TO_LIVE]


def _find(service: Service, caller: Caller, upload_id: str) -> _Upload:
    """The tenant's upload.

    Raises:
        ApiError: 404.
    """
    if re.fullmatch("upload-[0-9a-f]+", upload_id):
        try:
            path = _directory(service, caller) / upload_id / "upload.json"
            return _Upload.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            pass
    raise missing("upload", upload_id, "upload_id")


def _pending(service: Service, caller: Caller, upload_id: str) -> _Upload:
    """The tenant's upload, if parts can be added.

    Raises:
        ApiError: 404, 400.
    """
    upload = _find(service, caller, upload_id)
    expired = upload.created_at < time.time() - _SECONDS_TO_LIVE
    if upload.status != "pending" or expired:
        raise _over(upload_id, "expired" if expired else upload.status)
    return upload


def _write(service: Service, caller: Caller, upload: _Upload) -> None:
    write_atomically(_directory(service, caller) / upload.id / "upload.json", upload.model_dump_json(), 0o600)


def _end(
    service: Service, caller: Caller, upload: _Upload, status: Literal["completed", "cancelled"]
) -> _Upload:
    """Keep the upload's end, and remove its parts."""
    upload = upload.model_copy(update={"status": status})
    _write(service, caller, upload)
    for part in (_directory(service, caller) / upload.id).glob("*part*"):
        part.unlink(missing_ok=True)
    return upload


def _over(upload_id: str, status: str) -> ApiError:
    return ApiError(400, f"Upload {upload_id} is {status}.", "upload_id", "invalid_state")
