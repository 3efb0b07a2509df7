from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from sqlalchemy import select

from megatron_mux.serve.api import job_actions
from megatron_mux.serve.database.tables import Audit, Checkpoint, Job, Metric
from megatron_mux.serve.jobs.fields import Fault
from tests.unit.serve.api.world import World, make_world, status, upload

SETTLED = ("queued", "paused", "failed", "cancelled")


def create(client: OpenAI, **fields: Any) -> Any:
    fields.setdefault("training_file", None) or fields.update(training_file=upload(client))
    return client.fine_tuning.jobs.create(model="tiny", **fields)


def settled(world: World, client: OpenAI, **fields: Any) -> str:
    """A job whose files have been checked."""
    job_id: str = create(client, **fields).id
    world.until(lambda: status(client, job_id) in SETTLED)
    return job_id


def change(world: World, job_id: str, **fields: Any) -> None:
    """What an instance or the dispatcher would do."""
    with world.service.store.write() as session:
        job = session.scalars(select(Job).where(Job.id == job_id)).one()
        for name, value in fields.items():
            setattr(job, name, value)


def messages(client: OpenAI, job_id: str) -> list[str]:
    return [event.message for event in client.fine_tuning.jobs.list_events(job_id)]


def test_a_job_has_every_field_of_openai(world: World) -> None:
    client = world.client()
    training, validation = upload(client), upload(client)
    made = create(
        client, training_file=training, validation_file=validation, suffix="mine", metadata={"a": "b"},
        method={"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 2, "beta": "auto"}}}, seed=7,
        extra_body={"adapter": {"r": 4}, "priority": 2},
    )  # fmt: skip
    job = made.model_dump()
    assert job.pop("created_at") > 0 and job.pop("id").startswith("ftjob-")
    assert job.pop("organization_id").startswith("org-")
    resolved = {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 1.0}
    assert job.pop("hyperparameters") == resolved
    assert job.pop("method")["dpo"] == {"hyperparameters": {**resolved, "beta": 0.1}}
    assert job == {
        "object": "fine_tuning.job", "finished_at": None, "model": "tiny", "fine_tuned_model": None,
        "result_files": [], "status": "validating_files", "trained_tokens": 0, "training_file": training,
        "validation_file": validation, "seed": 7, "error": None, "metadata": {"a": "b"}, "integrations": [],
        "estimated_finish": None, "estimated_start": None, "user_provided_suffix": "mine", "reason": "",
        "desired": "run", "priority": 2, "step": 0, "total_steps": None,
    }  # fmt: skip
    (task,) = world.checker.tasks
    assert (task["name"], task["adapter"]["r"], task["training"]["loss"]) == (made.id, 4, "dpo")
    assert task["data"]["path"] == str(world.service.settings.files / training)


def test_files_are_checked_in_the_background(world: World) -> None:
    client = world.client()
    job_id = settled(world, client)
    assert status(client, job_id) == "queued" and world.woken
    assert client.fine_tuning.jobs.retrieve(job_id).model_extra["total_steps"] == 12  # type: ignore[index]
    event = client.fine_tuning.jobs.list_events(job_id).data[0]
    assert event.object == "fine_tuning.job.event" and (event.level, event.type, event.data) == (
        "info",
        "message",
        {},
    )
    assert event.message == "the files are valid; the job is queued"
    world.checker.file_faults = [Fault("line 1: bad", "validation_file"), Fault("line 2: worse")]
    failed = client.fine_tuning.jobs.retrieve(settled(world, client))
    assert failed.status == "failed" and failed.finished_at is not None and failed.error is not None
    assert failed.error.model_dump() == {
        "code": "invalid_validation_file", "message": "line 1: bad\nline 2: worse", "param": "validation_file"
    }  # fmt: skip
    with world.service.store.read() as session:
        actions = [own.action for own in session.scalars(select(Audit))]
    assert actions == ["file.create", "job.create"] * 2


def test_a_checker_that_breaks_down_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_actions, "_PAUSES", (0, 0))
    client = world.client()
    world.checker.broken = 2
    assert status(client, settled(world, client)) == "queued"
    world.checker.broken = 3
    failed = client.fine_tuning.jobs.retrieve(settled(world, client))
    assert failed.error is not None and failed.error.code == "server_error"


def test_all_faults_of_a_request_are_named(world: World) -> None:
    client = world.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.create(model="large", training_file="file-1", validation_file="file-2")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    faults: list[dict[str, str]] = caught.value.body["faults"]  # type: ignore[index]
    assert [fault["param"] for fault in faults] == ["model", "training_file", "validation_file"]
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, extra_body={"logging_dir": "/x", "training": {"report_to": "wandb"}})
    assert {"logging_dir", "training.report_to"} == {fault["param"] for fault in caught.value.body["faults"]}  # type: ignore[index]
    world.checker.field_faults = [Fault("training.num_train_epochs: no", "training.num_train_epochs")]
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}})
    assert caught.value.param == "method.supervised.hyperparameters.n_epochs"
    assert not client.fine_tuning.jobs.list().data


def test_a_request_that_is_sent_again_finds_its_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        monkeypatch.undo()
        raise SystemError("as if the server had been killed after the commit")

    client = world.client()
    file = upload(client)
    first = create(client, training_file=file)
    monkeypatch.setattr(job_actions, "check_in_background", killed)
    made = create(client.with_options(max_retries=2), training_file=file, seed=1)
    ids = [job.id for job in client.fine_tuning.jobs.list()]
    assert ids == [made.id, first.id] and create(client, training_file=file).id not in ids


def test_a_request_sent_again_while_the_first_is_checked_finds_its_job(world: World) -> None:
    client = world.client()
    file = upload(client)
    made = list[str]()

    def send(retry: str) -> None:
        made.append(create(client, training_file=file, extra_headers={"x-stainless-retry-count": retry}).id)

    first = threading.Thread(target=send, args=("0",))
    first.start()
    world.until(lambda: bool(world.checker.tasks))
    send("1")
    first.join()
    assert len(made) == 2 and len(set(made)) == 1


def test_a_job_that_waits_is_paused_resumed_and_cancelled(world: World) -> None:
    client = world.client()
    jobs = client.fine_tuning.jobs
    job_id = settled(world, client)
    assert jobs.pause(job_id).to_dict()["status"] == "paused" and jobs.resume(job_id).status == "queued"
    over = jobs.cancel(job_id)
    assert over.status == "cancelled" and over.finished_at is not None
    for action in (jobs.pause, jobs.resume, jobs.cancel):
        with pytest.raises(openai.BadRequestError, match="is cancelled") as caught:
            action(job_id)
        assert (caught.value.param, caught.value.code) == ("fine_tuning_job_id", "invalid_state")
    assert jobs.cancel(job_id, extra_headers={"x-stainless-retry-count": "1"}).status == "cancelled"
    assert messages(client, job_id)[:2] == ["the job is cancelled", "cancel requested"]


def test_a_job_at_an_instance_leaves_it_first(world: World) -> None:
    client = world.client()
    jobs = client.fine_tuning.jobs
    job_id = settled(world, client)
    change(world, job_id, status="running", instance="0.1", attempt=1)
    with pytest.raises(openai.BadRequestError, match="is running: it cannot be resumed"):
        jobs.resume(job_id)
    assert jobs.pause(job_id).status == "running"
    with pytest.raises(openai.BadRequestError, match="is being paused: it cannot be paused"):
        jobs.pause(job_id)
    assert jobs.resume(job_id).model_extra["desired"] == "run"  # type: ignore[index]
    assert jobs.cancel(job_id).model_extra["desired"] == "cancel"  # type: ignore[index]
    change(world, job_id, desired="run", instance=None, finished_at=1.0)
    with pytest.raises(openai.BadRequestError, match="about to end"):
        jobs.cancel(job_id)


def test_changes_while_files_are_checked(world: World) -> None:
    client = world.client()
    world.checker.free = False
    paused, cancelled, resumed = create(client), create(client), create(client)
    jobs = client.fine_tuning.jobs
    assert jobs.pause(paused.id).status == "validating_files"
    jobs.pause(resumed.id)
    assert jobs.resume(resumed.id).status == "validating_files"
    assert jobs.cancel(cancelled.id).status == "cancelled"
    world.checker.free = True
    world.until(lambda: [job.status for job in jobs.list()] == ["queued", "cancelled", "paused"])


def test_a_server_that_was_killed_checks_again(world: World, tmp_path: Path) -> None:
    client = world.client()
    world.checker.free = False
    job = create(client)
    world.http.portal.call(job_actions.stop_checks, world.service)  # type: ignore[union-attr]
    assert status(client, job.id) == "validating_files" and not world.service.checks
    after = make_world(tmp_path)
    with after.http:
        after.http.portal.call(job_actions.revalidate, after.service)  # type: ignore[union-attr]
        world.until(lambda: status(client, job.id) == "queued")
    after.service.store.close()


def test_lists_are_paged_and_filtered(world: World) -> None:
    client = world.client()
    given: tuple[dict[str, str] | None, ...] = ({"k": "v", "a.b": ""}, {"k": "w"}, None)
    ids = [create(client, metadata=metadata).id for metadata in given]
    jobs = client.fine_tuning.jobs
    first = jobs.list(limit=2)
    assert first.has_more and first.model_extra is not None and first.model_extra["first_id"] == ids[2]
    assert [job.id for job in first] == ids[::-1]
    assert [job.id for job in jobs.list(metadata={"k": "v"})] == [ids[0]]
    assert [job.id for job in jobs.list(metadata={"a.b": ""})] == [ids[0]]
    assert [job.id for job in jobs.list(metadata={"k": "v", "a.b": "c"})] == []
    assert [job.id for job in jobs.list(extra_query={"metadata": "null"})] == [ids[2]]
    assert len(jobs.list(metadata={}).data) == 3
    many = {f"k{i}": "v" for i in range(2000)}
    for wrong in (
        {"limit": 0},
        {"limit": 1000},
        {"after": "ftjob-0"},
        {"metadata": {'a"': "b"}},
        {"metadata": many},
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            jobs.list(**wrong)
        assert caught.value.status_code in (400, 404) and caught.value.param == next(iter(wrong))


def test_events_are_paged(world: World) -> None:
    client = world.client()
    job_id = settled(world, client)
    pages = client.fine_tuning.jobs.list_events(job_id, limit=1)
    assert pages.has_more and len(list(pages)) == 2
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.jobs.list_events(job_id, after="ftevent-x")


def test_checkpoints(world: World) -> None:
    client = world.client()
    job_id = settled(world, client, suffix="mine")
    with world.service.store.write() as session:
        for step in (2, 4):
            session.add(Checkpoint(id=f"ftckpt-{step}", job_id=job_id, created_at=1.5, step=step, path="x"))
        session.add(Metric(job_id=job_id, step=4, kind="train", values={"loss": 1.25}))
        values = {"eval_loss": 2.5, "eval_token_accuracy": 0.5}
        session.add(Metric(job_id=job_id, step=4, kind="eval", values=values))
    newest, oldest = client.fine_tuning.jobs.checkpoints.list(job_id, limit=1)
    assert newest.model_dump() == {
        "id": "ftckpt-4", "object": "fine_tuning.job.checkpoint", "created_at": 1, "step_number": 4,
        "fine_tuning_job_id": job_id,
        "fine_tuned_model_checkpoint": f"ft:tiny:ann:mine:{job_id[6:14]}:ckpt-step-4",
        "metrics": {"step": 4, "train_loss": 1.25, "train_mean_token_accuracy": None, "valid_loss": 2.5,
                    "valid_mean_token_accuracy": 0.5, "full_valid_loss": 2.5,
                    "full_valid_mean_token_accuracy": 0.5},
    }  # fmt: skip
    assert oldest.step_number == 2 and oldest.metrics.train_loss is None


def test_the_number_of_open_jobs_is_bounded(world: World) -> None:
    client = world.client()
    file = upload(client)
    made = [create(client, training_file=file).id for _ in range(5)]
    with pytest.raises(openai.RateLimitError, match="5 jobs"):
        create(client, training_file=file)
    client.fine_tuning.jobs.cancel(made[0])
    create(client, training_file=file)
