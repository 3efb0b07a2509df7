"""The control loop brings instances in line with the database, whatever was lost in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from megatron_mux.serve.channel.hub import Peer
from megatron_mux.serve.channel.messages import Leave, Message, Submit
from megatron_mux.serve.control.loop import SILENCE_SECONDS, ControlLoop
from megatron_mux.serve.control.reports import JobRecords
from megatron_mux.serve.database.tables import Instance
from megatron_mux.serve.executor.executor import Handle, Launch
from megatron_mux.serve.settings import Settings
from tests.unit.serve.control.jobs import add_job, get_job, make_store, messages


@dataclass
class Executor:
    """Starts nothing, and says what a test says."""

    launched: list[Launch] = field(default_factory=list)
    killed: list[Handle] = field(default_factory=list)
    gone: bool = False

    def start(self, launch: Launch) -> Handle:
        self.launched.append(launch)
        return {"name": launch.name}

    def stop(self, handle: Handle, kill: bool = False) -> None:
        self.killed.append(handle)

    def exited(self, handle: Handle) -> bool:
        return self.gone


@dataclass
class Sent:
    """In the place of the hub: keeps what is sent."""

    messages: list[tuple[str, Message]] = field(default_factory=list)


def make_loop(directory: Path, **more: Any) -> ControlLoop:
    settings = Settings(directory, {"tiny": directory / "backbone"}, flags=("--mux-fp32",), **more)
    store = make_store(directory)
    hub: Any = Sent()
    records = JobRecords(store, directory)
    return ControlLoop(settings, store, hub, records, Executor(), asyncio.Event(), lambda text: None)


def turn(
    loop: ControlLoop, *held: Mapping[str, int], connected: bool = True
) -> Sequence[tuple[str, Message]]:
    """What a turn sends while the instance is connected and holds these jobs."""
    writer: Any = None
    peers = {"0.0": Peer("0.0", writer, dict(held[0] if held else {}))} if connected else {}
    loop._turn(peers)
    sent, loop._sends = loop._sends, []
    return sent


@pytest.fixture
def loop(tmp_path: Path) -> ControlLoop:
    return make_loop(tmp_path)


def test_a_waiting_job_is_given_to_an_instance_that_is_ready(loop: ControlLoop) -> None:
    add_job(
        loop.store,
        status="queued",
        attempt=0,
        instance=None,
        checkpoint="instances/9.0/ftjob-1.0/checkpoint-2",
    )
    ((name, sent),) = turn(loop)
    job = get_job(loop.store)
    assert (job.instance, job.attempt, name) == ("0.0", 1, "0.0")
    saved = loop.settings.state / "instances/9.0/ftjob-1.0"
    assert sent == Submit(job="ftjob-1", attempt=1, task={"name": "ftjob-1"}, continue_from=str(saved))
    assert turn(loop, {"ftjob-1": 1}) == [], "it has it"
    assert turn(loop) == [(name, sent)], "it has lost it, or the command was"


def test_what_an_instance_should_not_have_it_is_to_let_go(loop: ControlLoop) -> None:
    add_job(loop.store, attempt=2)
    sent = turn(loop, {"ftjob-1": 1, "other": 4})
    leaves = [message for _, message in sent if isinstance(message, Leave)]
    assert leaves == [Leave(job="ftjob-1", attempt=1), Leave(job="other", attempt=4)]
    assert any(isinstance(message, Submit) and message.attempt == 2 for _, message in sent)


def test_a_job_that_is_paused_is_told_to_leave_once(loop: ControlLoop) -> None:
    add_job(loop.store, desired="pause")
    assert turn(loop, {"ftjob-1": 1}) == [("0.0", Leave(job="ftjob-1", attempt=1))]
    assert turn(loop, {"ftjob-1": 1}) == []


@pytest.mark.parametrize("how", ["silent", "ended"])
def test_the_jobs_of_an_instance_that_died_wait_for_another(
    loop: ControlLoop, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = loop.executor
    add_job(loop.store, saved_step=3)
    add_job(loop.store, "ftjob-2", desired="cancel")
    assert turn(loop, {"ftjob-1": 1, "ftjob-2": 1}) and not executor.killed
    now = time.monotonic()
    executor.gone = how == "ended"
    if how == "silent":
        monkeypatch.setattr(time, "monotonic", lambda: now + SILENCE_SECONDS + 1)
    turn(loop, connected=False)
    first, second = get_job(loop.store), get_job(loop.store, "ftjob-2")
    assert executor.killed == [{}], "what is left of it, so that it writes no more"
    assert (first.status, first.instance, first.suspects) == ("queued", None, 2)
    assert second.status == "cancelled"
    assert any("it goes on from step 3" in text for text in messages(loop.store))
    with loop.store.read() as session:
        assert session.get_one(Instance, "0.0").state == "gone"


def test_an_instance_is_launched_where_jobs_wait(tmp_path: Path) -> None:
    loop = make_loop(tmp_path, processes=2)
    with loop.store.write() as session:
        session.get_one(Instance, "0.0").state = "gone"
    turn(loop, connected=False)
    executor: Any = loop.executor
    assert not executor.launched, "nobody needs one"
    add_job(loop.store, status="queued", attempt=0, instance=None)
    turn(loop, connected=False)
    turn(loop, connected=False)
    (launch,) = executor.launched
    assert (launch.name, launch.processes) == ("0.1", 2)
    words = dict(zip(launch.words, launch.words[1:], strict=False))
    assert words["--save"] == str(tmp_path / "instances" / "0.1") and "--mux-fp32" in launch.words
    assert words["--save-interval"] == "25"
    with loop.store.read() as session:
        states = {own.name: own.state for own in session.scalars(select(Instance))}
    assert states == {"0.0": "gone", "0.1": "starting"}
    assert get_job(loop.store).reason


def test_results_are_written_once_a_job_has_finished(tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    (tmp_path / "files").mkdir()
    checkpoint = tmp_path / "instances" / "0.0" / "ftjob-1.1" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "adapter_config.json").write_text("{}")
    below = str(checkpoint.relative_to(tmp_path))
    add_job(loop.store, instance=None, finished_at=time.time(), checkpoint=below, step=4)
    turn(loop)
    job = get_job(loop.store)
    assert job.status == "succeeded" and job.model is not None and job.model.startswith("ft:tiny:ann::")
    assert {path.name for path in (tmp_path / "files").iterdir()} == set(job.result_files)
    turn(loop)
    assert len(get_job(loop.store).result_files) == 2
