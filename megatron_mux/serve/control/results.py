"""Makes the result files of jobs that have finished: metrics as CSV, and the adapter in peft's format as an archive."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from megatron_mux.files import sync_directory
from megatron_mux.saved_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megatron_mux.serve.control.reports import add_event, fail, model_name
from megatron_mux.serve.database.ids import new_id
from megatron_mux.serve.database.store import Store
from megatron_mux.serve.database.tables import Job, Metric, StoredFile, Tenant
from megatron_mux.serve.settings import Settings

_CARD = "README.md"
PURPOSE = "fine-tune-results"


def write_results(settings: Settings, store: Store, job_id: str) -> None:
    """Write a job's results and have it succeed; begun anew if the server was killed meanwhile."""
    with store.read() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        table = _metrics_table(session, job)
        name = model_name(job, session.get_one(Tenant, job.tenant_id).name)
    checkpoint = settings.state / job.checkpoint
    try:
        metrics = _write(settings.files, f"{job_id}-metrics.csv", lambda file: file.write(table.encode()))
        adapter = _write(settings.files, f"{job_id}-adapter.zip", lambda file: _archive(checkpoint, file))
    except OSError as error:
        with store.write() as session:
            job = session.scalars(select(Job).where(Job.id == job_id)).one()
            fail(
                session,
                job,
                "results",
                f"its results could not be written: {error.strerror or type(error).__name__}",
            )
        return
    with store.write() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        for written in (metrics, adapter):
            session.add(
                StoredFile(
                    id=written.id,
                    tenant_id=job.tenant_id,
                    created_at=job.finished_at,
                    filename=written.filename,
                    purpose=PURPOSE,
                    bytes=written.bytes,
                    sha256=written.sha256,
                )
            )
        job.result_files = [metrics.id, adapter.id]
        job.status, job.reason, job.model = "succeeded", "", name
        add_event(session, job, f"the job has succeeded: its model is {name}")


@dataclass(frozen=True)
class _Written:
    id: str
    filename: str
    bytes: int
    sha256: str


def _write(directory: Path, filename: str, fill: Callable[[IO[bytes]], Any]) -> _Written:
    """Write a file under a new id; complete, or not there."""
    own = new_id("file")
    partial = directory / f".{own}.partial"
    try:
        with open(partial, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        with open(partial, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = partial.stat().st_size
        os.rename(partial, directory / own)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(directory)
    return _Written(own, filename, size, digest)


def _archive(checkpoint: Path, file: IO[bytes]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # weights do not compress
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, _CARD):
            if (checkpoint / name).exists():
                archive.write(checkpoint / name, name)


def _metrics_table(session: Session, job: Job) -> str:
    """All lines of a job's metrics; a column for each figure that some line has."""
    found = session.scalars(
        select(Metric).where(Metric.job_id == job.id).order_by(Metric.step, Metric.kind.desc())
    ).all()
    columns = list(dict.fromkeys(key for own in found for key in own.values))
    text = io.StringIO()
    writer = csv.DictWriter(text, ["step", *columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"step": own.step, **own.values} for own in found)
    return text.getvalue()
