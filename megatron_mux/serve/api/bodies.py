"""Reads bodies of requests within bounds: JSON to memory, files to the disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from megatron_mux.serve.api.access import Caller
from megatron_mux.serve.api.errors import ApiError, faults_of, faulty
from megatron_mux.serve.service import Service
from megatron_mux.serve.settings import Settings

_BYTES_BETWEEN_CHECKS = 1 << 20
_BESIDE_A_FILE = 1 << 16
"""Bytes of a form that are not its file's."""
_MOST_UPLOADS = 16
"""Of a tenant, at the same time."""

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True)
class Received:
    """A multipart request: its fields, and its one file, which is on the disk.

    Attributes:
        fields: By their names.
        filename: As the client said it, without directories.
        bytes, sha256: Of the file.
    """

    fields: dict[str, str]
    filename: str
    bytes: int
    sha256: str


async def read_body(request: Request, most: int) -> bytes:
    """Read a body that is not a file.

    Raises:
        ApiError: 413: it has more than `most` bytes.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large("The body", most)
    return bytes(body)


async def read_json(request: Request, kind: type[Body], most: int) -> Body:
    """Read a body that is described by a model.

    Raises:
        ApiError: As `read_body`; 400: it is not what `kind` describes.
    """
    body = await read_body(request, most)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise faulty(faults_of(error)) from None


@contextmanager
def receiving(service: Service, caller: Caller) -> Iterator[None]:
    """Count an upload as one of its tenant's for the time of the block.

    Raises:
        ApiError: 429: the tenant has too many.
    """
    if service.receiving[caller.tenant_id] >= _MOST_UPLOADS:
        raise ApiError(429, f"{_MOST_UPLOADS} uploads are in progress: wait.", code="rate_limit_exceeded")
    service.receiving[caller.tenant_id] += 1
    try:
        yield
    finally:
        service.receiving[caller.tenant_id] -= 1


def check_reserve(settings: Settings) -> None:
    """Refuse to write if the disk has no more than its reserve.

    Raises:
        ApiError: 429.
    """
    if shutil.disk_usage(settings.state).free < settings.reserve_bytes:
        text = "The server's disk is full but for its reserve: try again later, or delete files."
        raise ApiError(429, text, code="disk_reserve", type="insufficient_quota")


async def receive_file(
    request: Request, name: str, path: Path, most: int, check: Callable[[], None]
) -> Received:
    """Write the file of a multipart request to the disk as it comes, and flush it.

    Args:
        request: Its body has not been read.
        name: Of the form's field that has the file.
        path: Where to write; does not exist yet, nor afterwards if an exception is raised.
        most: Bytes that the file may have.
        check: Raises if no more may be written. Called in other threads.

    Raises:
        ApiError: 413: the file is larger; 400: it is not such a form.
    """
    try:
        if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise ApiError(400, "The body must be multipart/form-data.")
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "w+b") as file:
            form = await _Parser(request, _bounded(request, most, check), file).parse()
            found = form.get(name)
            if not isinstance(found, UploadFile):
                raise ApiError(400, f"{name}: send a file.", name, "missing_required_parameter")
            if (found.size or 0) > most:
                raise too_large("The file", most)
            sha256 = await asyncio.to_thread(_flush, file)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, MultiPartException | LookupError | ValueError):  # the latter: odd charsets
            error = ApiError(400, f"The body is no valid form: {error}")
        raise error from None
    fields = {key: value for key, value in form.multi_items() if isinstance(value, str)}
    return Received(fields, plain_filename(found.filename or ""), found.size or 0, sha256)


class _Parser(MultiPartParser):
    """Starlette's parser, which writes the one file of a form to `file` rather than to memory and to `/tmp`."""

    def __init__(self, request: Request, stream: AsyncGenerator[bytes, None], file: BufferedRandom) -> None:
        super().__init__(request.headers, stream, max_files=1, max_fields=8, max_part_size=4096)
        self._file = file

    def on_headers_finished(self) -> None:
        """See `MultiPartParser`."""
        super().on_headers_finished()
        if self._current_part.file is not None:
            self._current_part.file.file = self._file


def plain_filename(name: str) -> str:
    """A client's name of a file without directories and control characters, at most 255 characters of it."""
    last = name.replace("\\", "/").rpartition("/")[2]
    return "".join(letter for letter in last if letter.isprintable())[:255] or "file"


def too_large(what: str, most: int) -> ApiError:
    """The error for more bytes than are allowed."""
    return ApiError(413, f"{what} has more than {most} bytes.", code="too_large")


async def _bounded(request: Request, most: int, check: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """Yield a form as it comes."""
    size, checked = 0, -_BYTES_BETWEEN_CHECKS
    async for chunk in request.stream():
        size += len(chunk)
        if size > most + _BESIDE_A_FILE:
            raise too_large("The file", most)
        if size - checked > _BYTES_BETWEEN_CHECKS:
            await asyncio.to_thread(check)
            checked = size
        yield chunk


def _flush(file: BufferedRandom) -> str:
    """Flush a file to the disk; returns its SHA-256."""
    file.flush()
    os.fsync(file.fileno())
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
