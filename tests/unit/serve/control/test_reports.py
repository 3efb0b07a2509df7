"""What instances report is committed once, and only by the instance that has the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.saved_files import MANIFESTS, manifest_name
from megatron_mux.serve.channel.messages import AnyReport, Lines, Saved, State
from megatron_mux.serve.control.reports import JobRecords
from tests.unit.serve.control.jobs import add_job, get_job, instance, make_store, messages, steps


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / (step + 1), "tokens": 10, "wall_s": 0.1, **more}


def lines(number: int, *made: dict[str, Any], attempt: int = 1) -> Lines:
    return Lines(number=number, job="ftjob-1", attempt=attempt, lines=list(made))


def saved(number: int, step: int, status: str = "running", reason: str = "") -> Saved:
    at = f"instances/0.0/ftjob-1.1/checkpoint-{step}"
    return Saved(
        number=number, job="ftjob-1", attempt=1, step=step, checkpoint=at, status=status, reason=reason
    )


@pytest.fixture
def records(tmp_path: Path) -> JobRecords:
    records = JobRecords(make_store(tmp_path), tmp_path)
    add_job(records.store)
    return records


def test_each_step_counts_once_however_often_it_is_reported_or_done(records: JobRecords) -> None:
    first: list[AnyReport] = [lines(1, {"step": 0, "eval_loss": 2.0}, line(1), line(2)), saved(2, 1)]
    records.commit("0.0", first)
    records.commit("0.0", first)  # the acknowledgement was lost
    records.commit("0.0", [lines(3, line(2, tokens=12), line(3))])  # step 2 was done again
    job = get_job(records.store)
    assert steps(records.store) == [(0, "eval"), (1, "train"), (2, "train"), (3, "train")]
    assert (job.step, job.saved_step, job.trained_tokens) == (3, 1, 30)
    assert job.checkpoint == "instances/0.0/ftjob-1.1/checkpoint-1"
    assert [text.partition(":")[0] for text in messages(records.store, "metrics")] == [
        "Step 0/4", "Step 1/4", "Step 2/4", "Step 3/4"
    ]  # fmt: skip
    assert records.last_report("0.0") == 3


@pytest.mark.parametrize(("attempt", "who"), [(2, "0.0"), (1, "0.1")])
def test_whoever_does_not_have_the_job_changes_nothing(records: JobRecords, attempt: int, who: str) -> None:
    with records.store.write() as session:
        session.add(instance("0.1"))
    records.commit(who, [lines(1, line(1), attempt=attempt)])
    assert steps(records.store) == [] and records.last_report(who) == 1


@pytest.mark.parametrize(
    ("desired", "status"), [("run", "queued"), ("pause", "paused"), ("cancel", "cancelled")]
)
def test_after_leaving_a_job_is_what_its_tenant_wants(records: JobRecords, desired: str, status: str) -> None:
    with records.store.write() as session:
        session.merge(get_job(records.store)).desired = desired
    records.commit("0.0", [saved(1, 2, "removed")])
    job = get_job(records.store)
    assert (job.status, job.instance, job.saved_step) == (status, None, 2)
    assert (job.finished_at is not None) == (status == "cancelled")


def test_a_job_that_finds_no_room_waits_and_one_that_is_refused_has_failed(records: JobRecords) -> None:
    told: list[tuple[str, str, str]] = []
    records.no_room = lambda *what: told.append(what)
    records.commit("0.0", [State(number=1, job="ftjob-1", attempt=1, state="no_room", reason="too large")])
    assert (get_job(records.store).status, told) == ("queued", [("0.0", "ftjob-1", "too large")])
    add_job(records.store, "ftjob-2")
    records.commit(
        "0.0", [State(number=2, job="ftjob-2", attempt=1, state="refused", reason="no such module")]
    )
    job = get_job(records.store, "ftjob-2")
    assert job.status == "failed" and job.error == {
        "code": "refused",
        "message": "no such module",
        "param": None,
    }


def test_a_job_that_has_diverged_has_failed_and_one_that_is_done_waits_for_its_results(
    records: JobRecords,
) -> None:
    records.commit("0.0", [saved(1, 4, "finished")])
    job = get_job(records.store)
    assert (job.status, job.instance) == ("running", None) and job.finished_at is not None
    add_job(records.store, "ftjob-2")
    failed = saved(2, 3, "failed", "its loss is not finite").model_copy(update={"job": "ftjob-2"})
    records.commit("0.0", [failed])
    assert get_job(records.store, "ftjob-2").error == {
        "code": "diverged", "message": "its loss is not finite", "param": None
    }  # fmt: skip


def test_what_a_dead_instance_has_not_reported_is_taken_from_its_files(
    records: JobRecords, tmp_path: Path
) -> None:
    run = tmp_path / "instances" / "0.0"
    checkpoint = run / "ftjob-1.1" / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    text = "".join(json.dumps(line(step)) + "\n" for step in (1, 2, 3, 4))
    (run / "ftjob-1.1" / "metrics.jsonl").write_text(text + '{"step": 5, "lo')  # it died while it wrote
    entry = {
        "name": "ftjob-1.1",
        "step": 3,
        "status": "running",
        "reason": "",
        "checkpoint": "ftjob-1.1/checkpoint-3",
    }
    (run / MANIFESTS).mkdir()
    (run / MANIFESTS / manifest_name(1)).write_text(json.dumps({"tasks": [entry]}))
    records.commit("0.0", [lines(1, line(1))])
    with records.store.write() as session:
        records.collect(session, session.merge(get_job(records.store)), run)
    job = get_job(records.store)
    assert [step for step, _ in steps(records.store)] == [1, 2, 3, 4]
    assert (job.step, job.saved_step, job.trained_tokens) == (4, 3, 40)
    assert job.checkpoint == "instances/0.0/ftjob-1.1/checkpoint-3"
