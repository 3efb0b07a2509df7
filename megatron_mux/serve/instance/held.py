"""The jobs that an instance has, as the run's loop and the connection's thread both see them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_mux.files import write_atomically
from megatron_mux.serve.channel.messages import AnyReport, Drain, Held, Leave, Lines, Saved, State, Submit
from megatron_mux.training import commands
from megatron_mux.training.commands import Command, CommandQueue

MOST_UNACKNOWLEDGED = 64
"""Reports that wait for the server; more metrics are read once it has committed them."""


@dataclass
class HeldJob:
    """A job that an instance has been given.

    Attributes:
        job, attempt: Which.
        is_refused: Whether it is to leave because there was no room for it.
    """

    job: str
    attempt: int
    is_refused: bool = False

    @property
    def task(self) -> str:
        """The name of its task: each attempt has files of its own."""
        return task_name(self.job, self.attempt)


def task_name(job: str, attempt: int) -> str:
    """The name of the task that an attempt of a job is."""
    return f"{job}.{attempt}"


@dataclass
class HeldJobs:
    """The jobs of an instance, the commands about them, and reports that the server has not committed.

    Attributes:
        directory: Of the run.
        on_first_poll: Called once the run can take jobs in.
        queue: Commands for the loop.
    """

    directory: Path
    on_first_poll: Callable[[], None] | None = None
    queue: CommandQueue = field(default_factory=CommandQueue)
    _jobs: dict[str, HeldJob] = field(default_factory=dict)  # by their tasks
    _reports: deque[AnyReport] = field(default_factory=deque)
    _number: int = 0
    _sent: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # -- from the server

    def submit(self, command: Submit) -> None:
        """Have the run take a job in, unless it has this attempt already."""
        with self._lock:
            held = HeldJob(command.job, command.attempt)
            if held.task in self._jobs:
                return
            file = self.directory / "tasks" / f"{held.task}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, yaml.safe_dump({**command.task, "name": held.task}, sort_keys=False))
            self._jobs[held.task] = held
            continues = Path(command.continue_from) if command.continue_from else None
            self.queue.put(commands.Submit(file, continues))

    def leave(self, command: Leave) -> None:
        """Have a job saved and leave."""
        with self._lock:
            task = task_name(command.job, command.attempt)
            if task in self._jobs:
                self.queue.put(commands.Cancel(task))
            else:
                self.report(State, job=command.job, attempt=command.attempt, state="removed")

    def drain(self, _: Drain | None = None) -> None:
        """Have every job leave, and the run end."""
        with self._lock:
            self.queue.put(*map(commands.Cancel, self._jobs), commands.Drain())

    def acknowledge(self, number: int) -> None:
        """Forget the reports up to a number."""
        with self._lock:
            while self._reports and self._reports[0].number <= number:
                self._reports.popleft()

    # -- to the server

    def report(self, kind: type[State] | type[Lines] | type[Saved], **fields: Any) -> None:
        """Have the server told something, for good."""
        with self._lock:
            self._number += 1
            self._reports.append(kind(number=self._number, **fields))

    def unsent(self, after: int | None = None) -> Sequence[AnyReport]:
        """The reports that have not been sent on this connection; `after`: a new one, whose end has those up to it."""
        with self._lock:
            if after is not None:
                self.acknowledge(after)
                self._sent = after
            found = [report for report in self._reports if report.number > self._sent]
            self._sent = max([self._sent, *(report.number for report in found)])
            return found

    @property
    def is_full(self) -> bool:
        """Whether so many reports wait that no metrics are to be read."""
        return len(self._reports) >= MOST_UNACKNOWLEDGED

    @property
    def has_told_all(self) -> bool:
        """Whether the server has committed every report."""
        return not self._reports

    def held(self) -> list[Held]:
        """The jobs, for `Hello`."""
        with self._lock:
            return [Held(job=own.job, attempt=own.attempt) for own in self._jobs.values()]

    def jobs(self) -> list[HeldJob]:
        """The jobs."""
        with self._lock:
            return list(self._jobs.values())

    def of(self, task: str) -> HeldJob | None:
        """The job that a task is."""
        with self._lock:
            return self._jobs.get(task)

    def drop(self, held: HeldJob) -> None:
        """Forget a job that is over here."""
        with self._lock:
            self._jobs.pop(held.task, None)

    # -- as a source of commands

    @property
    def awaited(self) -> str:
        """See `CommandSource`."""
        return "jobs"

    def poll(self) -> Sequence[Command]:
        """See `CommandSource`."""
        begin, self.on_first_poll = self.on_first_poll, None
        if begin is not None:
            begin()
        return self.queue.poll()
