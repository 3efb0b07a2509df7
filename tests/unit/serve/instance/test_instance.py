"""An instance's end: jobs that come and leave, reports that wait for the server, a connection that comes back."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from megatron_mux.saved_files import MANIFESTS, manifest_name
from megatron_mux.serve.channel.messages import (
    Abandon,
    Acknowledge,
    Beat,
    Complete,
    Hello,
    Leave,
    Lines,
    Piece,
    Reports,
    Saved,
    State,
    Submit,
    Welcome,
    read_from_instance,
)
from megatron_mux.serve.instance.connection import Connection
from megatron_mux.serve.instance.held import MOST_UNACKNOWLEDGED, HeldJobs
from megatron_mux.serve.instance.saves import RunFiles
from megatron_mux.serve.instance.states import NO_ROOM, TellsStates
from megatron_mux.tasks.life import StateChange
from megatron_mux.training import commands

SUBMIT = Submit(
    job="ftjob-1", attempt=2, task={"name": "ftjob-1", "training": {"max_steps": 3}}, continue_from="/a"
)
TASK = "ftjob-1.2"


def holding(directory: Path) -> HeldJobs:
    jobs = HeldJobs(directory)
    jobs.submit(SUBMIT)
    return jobs


def save(directory: Path, number: int, **entry: Any) -> None:
    (directory / MANIFESTS).mkdir(parents=True, exist_ok=True)
    usual = {"name": TASK, "step": 1, "status": "running", "reason": "", "checkpoint": f"{TASK}/checkpoint-1"}
    (directory / MANIFESTS / manifest_name(number)).write_text(json.dumps({"tasks": [{**usual, **entry}]}))


def write_lines(directory: Path, *steps: int) -> None:
    (directory / TASK).mkdir(exist_ok=True)
    with open(directory / TASK / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps({"step": step, "loss": 1.0, "tokens": 1}) + "\n" for step in steps))


def test_a_job_becomes_a_task_of_its_own_for_each_attempt_and_comes_once(tmp_path: Path) -> None:
    jobs = holding(tmp_path)
    jobs.submit(SUBMIT)
    file = tmp_path / "tasks" / f"{TASK}.yaml"
    assert jobs.poll() == [commands.Submit(file, Path("/a"))]
    assert yaml.safe_load(file.read_text()) == {"name": TASK, "training": {"max_steps": 3}}
    jobs.leave(Leave(job="ftjob-1", attempt=2))
    assert jobs.poll() == [commands.Cancel(TASK)]
    jobs.leave(Leave(job="ftjob-1", attempt=1))  # it has left already
    assert jobs.poll() == [] and [own.attempt for own in jobs.unsent()] == [1]


def test_a_job_never_waits_for_memory(tmp_path: Path) -> None:
    jobs = holding(tmp_path)
    jobs.poll()
    tells = TellsStates(jobs)
    tells.state_changed(StateChange(TASK, "joining", "waiting", ""))
    assert jobs.poll() == [commands.Cancel(TASK)]
    tells.state_changed(StateChange(TASK, "waiting", "removed", ""))
    (report,) = jobs.unsent()
    assert (
        isinstance(report, State)
        and (report.state, report.reason) == ("no_room", NO_ROOM)
        and not jobs.jobs()
    )


def test_a_job_that_trained_has_left_once_its_save_is_complete(tmp_path: Path) -> None:
    jobs, files = holding(tmp_path / "run"), None
    (tmp_path / "run" / TASK).mkdir(parents=True, exist_ok=True)
    files = RunFiles(jobs, tmp_path)
    tells = TellsStates(jobs)
    tells.state_changed(StateChange(TASK, "joining", "running", ""))
    write_lines(tmp_path / "run", 1)
    save(tmp_path / "run", 1)
    files.look()
    files.look()
    tells.state_changed(StateChange(TASK, "running", "removed", ""))
    assert jobs.jobs(), "it is still being saved"
    write_lines(tmp_path / "run", 2)
    save(tmp_path / "run", 2, step=2, status="removed", checkpoint=f"{TASK}/checkpoint-2")
    files.look()
    assert not jobs.jobs()
    told = [(type(own).__name__, getattr(own, "step", None)) for own in jobs.unsent()]
    assert told == [("State", None), ("Lines", None), ("Saved", 1), ("Lines", None), ("Saved", 2)]


def test_a_save_is_reported_after_the_metrics_of_its_steps_however_many_wait(tmp_path: Path) -> None:
    jobs = holding(tmp_path / "run")
    files = RunFiles(jobs, tmp_path)
    write_lines(tmp_path / "run", *range(1, 201 * MOST_UNACKNOWLEDGED))
    save(tmp_path / "run", 1, step=201 * MOST_UNACKNOWLEDGED - 1, checkpoint=f"{TASK}/checkpoint-9")
    files.look()
    first = jobs.unsent()
    assert len(first) == MOST_UNACKNOWLEDGED and all(isinstance(own, Lines) for own in first)
    files.look()
    assert not jobs.unsent(), "the server has committed nothing"
    jobs.acknowledge(first[-1].number)
    files.look()
    *lines, saved = jobs.unsent()
    assert isinstance(saved, Saved) and saved.checkpoint == f"run/{TASK}/checkpoint-9"
    done = [line["step"] for own in (*first, *lines) if isinstance(own, Lines) for line in own.lines]
    assert done == [*range(1, 201 * MOST_UNACKNOWLEDGED)]


class Server:
    """Listens as a server does, for one connection after the other."""

    def __init__(self, path: Path) -> None:
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen()

    def accept(self, last_report: int) -> list[Any]:
        """The greeting and what follows it, up to the first reports and a beat."""
        self.connection, _ = self.listening.accept()
        self.connection.settimeout(10)
        self.file = self.connection.makefile("rb")
        found = [read_from_instance(self.file.readline())]
        self.connection.sendall(Welcome(last_report=last_report).line())
        while not any(isinstance(own, Reports) for own in found) or not any(
            isinstance(own, Beat) for own in found
        ):
            found.append(read_from_instance(self.file.readline()))
        return found


def test_reports_are_sent_again_to_a_server_that_comes_back(tmp_path: Path) -> None:
    server = Server(tmp_path / "socket")
    jobs = holding(tmp_path / "run")
    jobs.report(State, job="ftjob-1", attempt=2, state="running")
    connection = Connection(tmp_path / "socket", "0.0", "secret", jobs, RunFiles(jobs, tmp_path))
    connection.start()
    hello, *rest = server.accept(0)
    assert isinstance(hello, Hello) and [(own.job, own.attempt) for own in hello.jobs] == [("ftjob-1", 2)]
    server.connection.shutdown(socket.SHUT_RDWR)  # it dies before it has committed anything
    server.connection.close()
    _, *again = server.accept(0)
    assert [own for own in again if isinstance(own, Reports)] == [
        own for own in rest if isinstance(own, Reports)
    ]
    server.connection.sendall(Acknowledge(report=1).line())
    began = time.monotonic()
    connection.close()
    assert jobs.has_told_all and time.monotonic() - began < 5


def next_command(connection: Connection, jobs: HeldJobs) -> commands.Command:
    """The one command that comes next, once the loop is told to look."""
    while True:
        assert connection.arrived.wait(5)
        connection.arrived.clear()
        if found := jobs.poll():
            (command,) = found
            return command


def test_completions_are_asked_for_told_of_at_once_and_abandoned_with_the_server(tmp_path: Path) -> None:
    server = Server(tmp_path / "socket")
    jobs = holding(tmp_path / "run")
    jobs.poll()
    jobs.report(State, job="ftjob-1", attempt=2, state="running")
    connection = Connection(tmp_path / "socket", "0.0", "secret", jobs, RunFiles(jobs, tmp_path))
    connection.start()
    server.accept(0)
    asked = Complete(id="c", messages=[{"role": "user", "content": "hello"}], choices=2)
    server.connection.sendall(asked.line())
    assert next_command(connection, jobs) == commands.Tell(asked)

    def piece(own: str, choice: int, **more: Any) -> Piece:
        return Piece(id=own, choice=choice, prompt_tokens=3, completion_tokens=1, **more)

    pieces = [piece("c", 0, text="a"), piece("c", 0, finish="stop"), piece("c", 1, text="b")]
    for own in (piece("unknown", 0), *pieces):  # nobody has asked for the first one
        connection.send(own)
    found: list[Any] = []
    while len(found) < 3:
        message = read_from_instance(server.file.readline())
        found += [message] * isinstance(message, Piece)
    assert found == pieces
    server.connection.shutdown(socket.SHUT_RDWR)
    server.connection.close()
    assert next_command(connection, jobs) == commands.Tell(Abandon(id="c")), "whoever asked is gone"
    server.accept(0)
    server.connection.sendall(Acknowledge(report=1).line())
    connection.close()
