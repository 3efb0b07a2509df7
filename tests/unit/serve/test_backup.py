"""Backups of a service: what the database names is there, to the byte, and a restored service goes on."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from sqlalchemy import select

from megatron_mux import checkpoint
from megatron_mux.checkpoint import SavedTask, TaskToSave
from megatron_mux.engine import BestEvaluation, Snapshot
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import plan_for
from megatron_mux.saved_files import TRAINING_STATE
from megatron_mux.serve import backup
from megatron_mux.serve.database.tables import Checkpoint, Instance, Job
from tests.unit.serve.api.world import URL, World, make_world, status, upload
from tests.unit.serve.control.jobs import instance, messages

RUN = "instances/0.0"


@dataclass
class Place:
    """A service with a tenant, and where its backup goes."""

    root: Path
    world: World
    key: str

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def kept(self) -> Path:
        return self.root / "kept"

    @property
    def client(self) -> OpenAI:
        return client_of(self.world, self.key)

    def back_up(self) -> list[str]:
        """Make a backup; returns what was said of snapshots."""
        said: list[str] = []
        backup.back_up(self.state / "service.db", self.state, self.kept, said.append)
        assert not leftovers(self.root)
        return [line for line in said if line.startswith("snapshot")]

    def job(self, steps: tuple[int, ...] = (), **fields: Any) -> str:
        """A job at an instance that has saved some steps, of which the database knows the first."""
        client = self.client
        job_id = client.fine_tuning.jobs.create(model="tiny", training_file=upload(client)).id
        self.world.until(lambda: status(client, job_id) == "queued")
        for step in steps:
            save(self.state / RUN, f"{job_id}.1", step, **fields)
        with self.world.service.store.write() as session:
            if session.get(Instance, "0.0") is None:
                session.add(instance("0.0", handle={"pid": os.getpid(), "mark": "x"}))
            job = session.scalars(select(Job).where(Job.id == job_id)).one()
            job.status, job.instance, job.attempt, job.step = "running", "0.0", 1, 7
            for step in steps[:1]:
                job.checkpoint, job.saved_step = f"{RUN}/{job_id}.1/checkpoint-{step}", step
                row = {"id": f"ftckpt-{job_id}", "job_id": job_id, "created_at": 1.0, "step": step}
                session.add(Checkpoint(path=job.checkpoint, **row))
        return job_id


def save(run: Path, task: str, step: int, value: float = 0.0, **fields: Any) -> None:
    weight = {"k.lora_A.weight": torch.full((2, 3), value)}
    entry = SavedTask(task, step, "running", "", "", {"name": task}, "data", **fields)
    state = TaskToSave(entry, Snapshot(step, weight, {}, {}), {"peft_type": "LORA"})
    checkpoint.save(run, [state], plan_for("spatial", {task: 1}, 1), "backbone")


def client_of(world: World, key: str) -> OpenAI:
    return OpenAI(http_client=world.http, base_url=f"{URL}/v1", api_key=key, max_retries=0)


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name.startswith(".")]


def rows(directory: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(directory / "service.db")) as database:
        return database.execute(query).fetchall()


def check_files(directory: Path) -> list[str]:
    """Check that the files of a backup are those that its database names; returns their ids."""
    named = rows(directory, "SELECT id, bytes, sha256 FROM files")
    for own, size, sha256 in named:
        content = (directory / "files" / own).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256)
    assert sorted(own for own, *_ in named) == sorted(path.name for path in (directory / "files").iterdir())
    return [own for own, *_ in named]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "state").mkdir()
    world = make_world(tmp_path / "state")
    (tmp_path / "state/files").mkdir()
    with world.http:
        yield Place(tmp_path, world, world.key("ann"))
    world.service.store.close()


def test_a_backup_while_files_and_jobs_come_is_whole(place: Place, tmp_path: Path) -> None:
    over, made = threading.Event(), list[str]()

    def work() -> None:
        while not over.is_set():
            made.append(upload(place.client, os.urandom(2000)))
            place.client.fine_tuning.jobs.create(model="tiny", training_file=made[-1])

    writer = threading.Thread(target=work)
    writer.start()
    try:
        for number in range(3):
            before = len(made)
            place.world.until(lambda before=before: len(made) > before + 1)  # type: ignore[misc]
            place.back_up()
            assert set(made[: before + 1]) <= set(check_files(place.kept))
            training = "SELECT json_extract(answer, '$.training_file') FROM jobs"
            assert {own for (own,) in rows(place.kept, training)} <= set(check_files(place.kept))
            backup.restore(place.kept, tmp_path / f"new{number}", print)
            check_files(tmp_path / f"new{number}")
            shutil.rmtree(place.kept)
    finally:
        over.set()
        writer.join()


def test_a_backup_has_nothing_else_and_is_its_owners_alone(place: Place) -> None:
    upload(place.client)
    place.back_up()
    assert sorted(path.name for path in place.kept.iterdir()) == ["backup.json", "files", "service.db"]
    assert place.kept.stat().st_mode & 0o777 == 0o700


def before_link(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], bool]) -> None:
    """Have something happen before a file is linked, until it returns True."""
    real, done = os.link, False

    def link(source: Path, target: Path) -> None:
        nonlocal done
        done = done or act(source)
        real(source, target)

    monkeypatch.setattr(backup.os, "link", link)  # type: ignore[attr-defined]


def test_a_file_that_is_deleted_meanwhile_leads_to_another_snapshot(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [upload(place.client, content) for content in (b"a", b"bb", b"ccc")]

    def delete(source: Path) -> bool:
        if len(list((place.root / ".partial-kept/files").iterdir())) != 1:
            return False
        kept = next((place.root / ".partial-kept/files").iterdir()).name
        for own in (kept, source.name):  # one that is in the backup already, and the next one
            place.client.files.delete(own)
            made.remove(own)
        return True

    before_link(monkeypatch, delete)
    said = place.back_up()
    assert len(said) == 2 and "has gone meanwhile" in said[1]
    assert check_files(place.kept) == made and len(made) == 1


def test_what_is_not_there_at_all_is_named(place: Place) -> None:
    own = upload(place.client)
    (place.state / "files" / own).unlink()
    with pytest.raises(UserError, match=f"{own}: the database names it, but it is not there"):
        place.back_up()
    (place.state / "files" / own).write_bytes(b"x")
    with pytest.raises(UserError, match=f"{own}: has 1 bytes"):
        place.back_up()
    assert not place.kept.exists() and not leftovers(place.root)


def test_a_checkpoint_that_is_replaced_meanwhile_is_taken_whole(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = place.job((5,))
    now = place.state / RUN / f"{job_id}.1/checkpoint-5"

    def replace(source: Path) -> bool:
        if source.name != TRAINING_STATE:
            return False
        save(place.state / RUN, f"{job_id}.1", 5, value=1.0)
        return True

    before_link(monkeypatch, replace)
    assert len(place.back_up()) == 2
    for path in now.iterdir():
        assert os.path.samefile(path, place.kept / path.relative_to(place.state))


def test_a_checkpoint_that_was_pruned_is_no_row_but_the_newest_must_be_whole(place: Place) -> None:
    job_id = place.job((5,))
    with place.world.service.store.write() as session:
        row = {"id": "ftckpt-0", "job_id": job_id, "created_at": 0.0, "step": 2}
        session.add(Checkpoint(path=f"{RUN}/{job_id}.1/checkpoint-2", **row))
    half = place.state / RUN / f"{job_id}.1/checkpoint-2"  # it is just being removed
    half.mkdir()
    (half / "README.md").touch()
    place.back_up()
    assert rows(place.kept, "SELECT step FROM checkpoints") == [(5,)]
    assert not (place.kept / half.relative_to(place.state)).exists()
    backup.restore(place.kept, place.root / "new", print)
    shutil.rmtree(place.kept)
    (place.state / RUN / f"{job_id}.1/checkpoint-5" / TRAINING_STATE).unlink()
    with pytest.raises(UserError, match="checkpoint-5: the database names it"):
        place.back_up()


@pytest.mark.parametrize("links", [True, False])
def test_backups_link_where_they_can_and_restoring_copies(
    place: Place, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "another file system")

    own = upload(place.client, b"abc")
    if not links:
        monkeypatch.setattr(backup.os, "link", refuse)  # type: ignore[attr-defined]
    place.back_up()
    backup.restore(place.kept, place.root / "new", print)
    kept, new = (place.root / name / "files" / own for name in ("kept", "new"))
    assert os.path.samefile(kept, place.state / "files" / own) == links
    assert kept.read_bytes() == new.read_bytes() == b"abc" and not os.path.samefile(kept, new)


def test_a_restored_service_has_the_same_files_and_jobs_and_those_that_ran_wait(place: Place) -> None:
    first = place.job((2,))
    other = f"{first}.1/checkpoint-2"
    named = str((place.state / RUN / other).resolve())  # as a run names what it went on from
    job_id = place.job((5, 10), good=named, best=BestEvaluation(checkpoint=named))
    place.back_up()
    before = {job.id: job.to_dict() for job in place.client.fine_tuning.jobs.list()}
    files = [file.to_dict() for file in place.client.files.list()]
    shutil.rmtree(place.state)
    kept = backup.restore(place.kept, place.root / "new", print)
    assert kept.jobs == 2 and not leftovers(place.root)

    new, state = make_world(place.root / "new"), place.root / "new"
    with new.http:
        client = client_of(new, place.key)
        assert [file.to_dict() for file in client.files.list()] == files
        after = {job.id: job.to_dict() for job in client.fine_tuning.jobs.list()}
    assert after.keys() == before.keys() == {first, job_id}
    reason = "the service was restored from a backup"
    assert {own["status"] for own in before.values()} == {"running"}
    assert after == {name: {**own, "status": "queued", "reason": reason} for name, own in before.items()}
    with new.service.store.read() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        gone = session.scalars(select(Instance)).one()
    assert (job.instance, job.attempt, job.step, job.saved_step) == (None, 1, 7, 5)
    assert job.task["data"]["path"] == str(state.resolve() / "files" / job.answer["training_file"])
    assert Path(job.task["data"]["path"]).is_file()
    assert gone.state == "gone" and gone.ended_at is not None
    assert f"the job is queued: {reason}" in messages(new.service.store)
    new.service.store.close()

    # It goes on from the step that the database knows, not from one that was saved later.
    manifest = checkpoint.load(state / RUN, "backbone")
    assert manifest is not None
    entry = next(own for own in manifest.tasks if own.name == f"{job_id}.1")
    assert (entry.step, str(Path(RUN, entry.checkpoint))) == (5, job.checkpoint)
    assert checkpoint.load_task(state / RUN, entry).step == 5
    for also in (entry.good, entry.best.checkpoint):
        assert os.path.samefile(state / RUN / also, state / RUN / other)
    assert not (state / RUN / f"{job_id}.1/checkpoint-10").exists()


def _cut(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1])


def _change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["files/file-*", f"{RUN}/*/*/adapter_model*", f"{RUN}/manifests/*"])
@pytest.mark.parametrize("damage", [_cut, Path.unlink])
def test_a_damaged_backup_is_refused_by_name(place: Place, what: str, damage: Callable[[Path], None]) -> None:
    place.job((5,))
    place.back_up()
    path = next(place.kept.glob(what))
    damage(path)
    refused(place, str(path.relative_to(place.kept)))


@pytest.mark.parametrize("what", ["files/file-*", "service.db"])
def test_other_bytes_than_were_kept_are_refused_by_name(place: Place, what: str) -> None:
    upload(place.client)
    place.back_up()
    path = next(place.kept.glob(what))
    _change(path)
    refused(place, str(path.relative_to(place.kept)))


def test_a_list_that_is_none_and_a_newer_database_are_refused(place: Place) -> None:
    upload(place.client)
    place.back_up()
    path = place.kept / "backup.json"
    content = json.loads(path.read_text())
    outside = {**content, "sizes": {"files/../../x": 1}}
    for text, problem in (
        ("{", "backup.json cannot be read"),
        (json.dumps(outside), "names files/../../x, which is no part"),
        (json.dumps({**content, "sizes": {}}), "files/file-.* is not what its tenant stored"),
    ):
        path.write_text(text)
        refused(place, problem)
    with closing(sqlite3.connect(place.kept / "service.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    digest = hashlib.sha256((place.kept / "service.db").read_bytes()).hexdigest()
    path.write_text(json.dumps({**content, "database": digest}))
    refused(place, "newer version")
    path.unlink()
    refused(place, "is no backup")


def refused(place: Place, name: str) -> None:
    with pytest.raises(UserError, match=name):
        backup.restore(place.kept, place.root / "new", print)
    assert not (place.root / "new").exists() and not leftovers(place.root)


def test_a_directory_that_has_something_or_no_parent_is_refused(place: Place) -> None:
    upload(place.client)
    place.back_up()
    with pytest.raises(UserError, match="exists already: choose another directory"):
        place.back_up()
    for name, problem in (("state", "exists already"), ("a/b", "make it first")):
        with pytest.raises(UserError, match=f"--state .*{problem}"):
            backup.restore(place.kept, place.root / name, print)
    assert not (place.root / "a").exists() and (place.state / "service.db").exists()
