"""Backups of a service whose database is SQLite: all that a snapshot of the database names, as of that moment.

A backup is a directory like that of a service, with `service.db`, `files/` and `instances/`, and with a list of what is
in it, `backup.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

from pydantic import BaseModel
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from megatron_mux.errors import UserError
from megatron_mux.files import new_directory, sync_directory, write_atomically, write_pieces
from megatron_mux.memory.sizes import show_size
from megatron_mux.saved_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MANIFESTS,
    TRAINING_STATE,
    manifests,
)
from megatron_mux.serve.control.reports import OVER, end_lease
from megatron_mux.serve.database.store import Store, sqlite_url
from megatron_mux.serve.database.tables import Checkpoint, Instance, Job, StoredFile

_DATABASE, _LIST = "service.db", "backup.json"
_OF_CHECKPOINT = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, TRAINING_STATE)
_TRIES = 3
_AT_ONCE = 1 << 20
_SECONDS_TO_WAIT = 30.0
"""For a lock on the database."""
_SECONDS_BETWEEN_LINES = 5.0

Say = Callable[[str], None]


class _List(BaseModel):
    """What is in a backup: the SHA-256 of its database, and the sizes of all other files by their paths in it."""

    format: Literal[1] = 1
    made_at: float
    database: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class Kept:
    """What a backup has; `bytes` without the database."""

    jobs: int
    files: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.jobs} jobs, {self.files} files, {show_size(self.bytes)}"


def back_up(database: Path, state: Path, target: Path, say: Say) -> Kept:
    """Make a backup, complete or not at all. The service may run meanwhile.

    Args:
        database: SQLite's file.
        state: The service's directory.
        target: A directory that does not exist, or is empty.
        say: Told what happens, a line at a time.

    Raises:
        UserError: It cannot be written, or something that the database names is not there.
    """
    _check_parent("--to", target)
    with new_directory("--to", target) as partial:
        partial.chmod(0o700)
        gone = ""
        for number in range(1, _TRIES + 1):
            say(f"snapshot {number} of the database" + (f", as {gone} has gone meanwhile" if gone else ""))
            copies = _Copies(state.resolve(), partial, say)
            try:
                kept = _snapshot(database, copies)
                break
            except FileNotFoundError as error:
                gone = str(error.filename)
        else:
            raise UserError(
                f"{gone}: the database names it, but it is not there, after {_TRIES} snapshots: put it back, or delete "
                "what names it over the API"
            )
        named = {_DATABASE, *copies.sizes}
        for path in partial.rglob("*"):
            if path.is_file() and str(path.relative_to(partial)) not in named:
                path.unlink()  # an earlier snapshot named it
        with open(partial / _DATABASE, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        own = _List(made_at=time.time(), database=digest, sizes=copies.sizes)
        write_atomically(partial / _LIST, own.model_dump_json(indent=1), 0o600)
        _sync_directories(partial)
    return kept


def restore(backup: Path, state: Path, say: Say) -> Kept:
    """Make a service's directory of a backup, complete or not at all; jobs that were at instances wait.

    No process is touched: those that the backup knows belong to the service that it was made of.

    Args:
        backup: Its directory, of which everything is copied.
        state: A directory that does not exist, or is empty.
        say: Told what happens, a line at a time.

    Raises:
        UserError: The backup is damaged, or of a newer version, or `state` cannot be written.
    """
    _check_parent("--state", state)
    own, digests = _read_list(backup), dict[str, str]()
    with new_directory("--state", state) as partial:
        partial.chmod(0o700)
        if _copy_whole(backup, partial, _DATABASE) != own.database:
            raise _damaged(backup, _DATABASE, "is not what was kept")
        with closing(Store(sqlite_url(partial))) as store, store.write() as session:
            say(f"copying {len(own.sizes)} files")
            for name, size in own.sizes.items():
                digests[name] = _copy_whole(backup, partial, name)
                if (found := (partial / name).stat().st_size) != size:
                    raise _damaged(backup, name, f"has {found} bytes, and had {size}")
            for file in session.scalars(select(StoredFile)):
                if digests.get(f"files/{file.id}") != file.sha256:
                    raise _damaged(backup, f"files/{file.id}", "is not what its tenant stored")
            _end_leases(session, state.resolve())
            kept = Kept(
                session.scalar(select(func.count(Job.id))) or 0, len(own.sizes), sum(own.sizes.values())
            )
        _sync_directories(partial)
    return kept


# -- backups


@dataclass
class _Copies:
    """Fills a backup. What an earlier snapshot has brought there is not copied again.

    Attributes:
        state: The service's directory.
        partial: The backup's.
        say: See `back_up`.
        sizes: Of all that this snapshot names, by paths below `partial`.
    """

    state: Path
    partial: Path
    say: Say
    sizes: dict[str, int] = field(default_factory=dict)
    _told: float = field(default_factory=time.monotonic)

    def file(self, name: str) -> None:
        """Have a file, whose content never changes."""
        target = self.partial / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.state / name, target)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without links
                _copy(self.state / name, target)
        self.sizes[name] = target.stat().st_size
        if time.monotonic() - self._told > _SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self.say(f"{len(self.sizes)} files, {show_size(sum(self.sizes.values()))} so far")

    def checkpoint(self, name: str) -> None:
        """Have a checkpoint: all of its directory, or nothing."""
        source, target = self.state / name, self.partial / name
        if target.exists():
            source = target
        before = source.stat().st_ino
        try:
            names = {path.name for path in source.iterdir()}
            for own in sorted(names):
                self.file(f"{name}/{own}")
            # Else it is being removed, or another one has replaced it.
            if not names.issuperset(_OF_CHECKPOINT) or source.stat().st_ino != before:
                raise FileNotFoundError(None, None, str(source))
        except FileNotFoundError:
            shutil.rmtree(target, ignore_errors=True)
            self.sizes = {own: size for own, size in self.sizes.items() if not own.startswith(f"{name}/")}
            raise

    def manifest(self, run: PurePath, wanted: Collection[str]) -> None:
        """Write a run's manifest that names the checkpoints which jobs go on from, and none that came later.

        Args:
            run: Below the service's directory.
            wanted: Checkpoints below the run's.
        """
        found: dict[str, dict[str, Any]] = {}
        for _, path in sorted(manifests(self.state / run), reverse=True):
            try:
                manifest = json.loads(path.read_text())
            except ValueError:  # it is no save
                continue
            for entry in manifest["tasks"]:
                if entry["checkpoint"] in wanted:
                    found.setdefault(entry["checkpoint"], entry)
            if len(found) == len(wanted):
                break
        else:
            raise FileNotFoundError(None, None, str(self.state / run / MANIFESTS))
        for entry in found.values():
            entry["good"] = self._beside(run, entry["good"])
            if entry.get("best"):
                entry["best"]["checkpoint"] = self._beside(run, entry["best"]["checkpoint"])
        name = f"{run}/{MANIFESTS}/{path.name}"
        text = json.dumps({**manifest, "tasks": list(found.values())}, indent=1)
        write_atomically(self.partial / name, text, 0o600)
        self.sizes[name] = (self.partial / name).stat().st_size

    def _beside(self, run: PurePath, named: str) -> str:
        """Have another checkpoint that an entry names, and name it wherever the service is; empty if it is gone."""
        path = PurePath(os.path.relpath(self.state / run / named, self.state))
        if not named or ".." in path.parts:
            return ""
        try:
            self.checkpoint(str(path))
        except FileNotFoundError:
            return ""
        return os.path.relpath(path, run)


def _snapshot(database: Path, copies: _Copies) -> Kept:
    """Copy the database, and then what it names.

    Raises:
        FileNotFoundError: That has been deleted meanwhile.
    """
    copy = copies.partial / _DATABASE
    copy.unlink(missing_ok=True)
    copy.touch(0o600)
    try:
        with (
            closing(sqlite3.connect(database, timeout=_SECONDS_TO_WAIT)) as source,
            closing(sqlite3.connect(copy)) as own,
        ):
            source.backup(own)
    except sqlite3.Error as error:
        raise UserError(f"the database {database} cannot be copied: {error}") from error
    with closing(Store(sqlite_url(copies.partial))) as store, store.write() as session:
        files = session.scalars(select(StoredFile)).all()
        for file in files:
            copies.file(name := f"files/{file.id}")
            if copies.sizes[name] != file.bytes:
                raise UserError(
                    f"{copies.state / name}: has {copies.sizes[name]} bytes, and its tenant stored {file.bytes}: put "
                    "it back, or delete it over the API"
                )
        jobs = session.scalars(select(Job)).all()
        _keep_checkpoints(session, jobs, copies)
        return Kept(len(jobs), len(copies.sizes), sum(copies.sizes.values()))


def _keep_checkpoints(session: Session, jobs: Sequence[Job], copies: _Copies) -> None:
    newest = {job.checkpoint: job for job in jobs if job.checkpoint}
    runs: dict[PurePath, set[str]] = {}
    for name, job in newest.items():
        copies.checkpoint(name)
        if job.status not in OVER:
            run = PurePath(name).parents[1]
            runs.setdefault(run, set()).add(str(PurePath(name).relative_to(run)))
    for run, wanted in runs.items():
        copies.manifest(run, wanted)
    for row in session.scalars(select(Checkpoint)):
        try:
            copies.checkpoint(row.path)
        except FileNotFoundError:
            session.delete(row)  # --mux-keep-checkpoints has removed it; the newest ones are there, above


# -- restoring


def _read_list(backup: Path) -> _List:
    try:
        own = _List.model_validate_json((backup / _LIST).read_bytes())
    except FileNotFoundError:
        raise UserError(f"--from {backup}: is no backup: it has no {_LIST}") from None
    except ValueError as error:
        raise _damaged(backup, _LIST, f"cannot be read ({error})") from None
    for name in own.sizes:
        parts = PurePath(name).parts
        if parts[:1] not in (("files",), ("instances",)) or ".." in parts:
            raise _damaged(backup, _LIST, f"names {name}, which is no part of a backup")
    return own


def _copy_whole(backup: Path, partial: Path, name: str) -> str:
    """Copy a file of a backup; returns its SHA-256."""
    (partial / name).parent.mkdir(parents=True, exist_ok=True)
    try:
        return _copy(backup / name, partial / name)
    except FileNotFoundError:
        raise _damaged(backup, name, "is missing") from None


def _end_leases(session: Session, state: Path) -> None:
    """Have jobs find their files below `state`, and wait if they were at an instance; no instance is left."""
    gone = {"state": "gone", "ended_at": time.time(), "reason": "the service was restored from a backup"}
    session.execute(update(Instance).where(Instance.state != "gone").values(gone))
    for job in session.scalars(select(Job).where(Job.status.not_in(OVER))):
        sections = {
            key: {**own, "path": str(state / "files" / PurePath(own["path"]).name)}
            for key, own in job.task.items()
            if isinstance(own, dict) and "path" in own
        }
        job.task = {**job.task, **sections}
        if job.instance is not None:
            end_lease(session, job, "the service was restored from a backup")


def _damaged(backup: Path, name: str, what: str) -> UserError:
    return UserError(f"--from {backup}: {name} {what}: the backup is damaged: restore another one")


# -- both


def _check_parent(flag: str, directory: Path) -> None:
    if not directory.absolute().parent.is_dir():
        raise UserError(
            f"{flag} {directory}: there is no directory {directory.absolute().parent}: make it first"
        )


def _copy(source: Path, target: Path) -> str:
    """Copy a file, flushed to disk; returns its SHA-256."""
    digest = hashlib.sha256()

    def pieces(file: BinaryIO) -> Iterator[bytes]:
        while piece := file.read(_AT_ONCE):
            digest.update(piece)
            yield piece

    with open(source, "rb") as file:
        target.touch(0o600)
        write_pieces(target, pieces(file))
    return digest.hexdigest()


def _sync_directories(directory: Path) -> None:
    for path in (directory, *directory.rglob("*")):
        if path.is_dir():
            sync_directory(path)
