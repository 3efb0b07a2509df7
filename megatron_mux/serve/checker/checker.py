"""The server's end of the checks: a pool of warm processes that are replaced when they die or take too long."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_mux.serve.jobs.fields import Fault

WORKER = (sys.executable, "-m", "megatron_mux.serve.checker.worker")
"""The command of a worker; its kind of work follows."""

Work = Literal["fields", "files"]

_log = logging.getLogger(__name__)

_TRIES = 2
_LONGEST_ANSWER = 2**24
_SECONDS_TO_START = 180.0
_SLOWEST = 50_000.0
"""Bytes of a file that are checked in a second, at least, beside engines that use all cores."""


@dataclass(frozen=True)
class Checked:
    """What a check of a task's files found.

    Attributes:
        faults: Everything that is wrong with them; the rest counts only without any.
        total_steps: Optimizer steps of the task.
        records: Those that it learns from; a pair is one.
        tokens: Of one pass over them.
        notes: Lines for the client, such as how many records are cut.
    """

    faults: list[Fault]
    total_steps: int | None = None
    records: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)


class Checker:
    """Checks tasks and files in processes that may import what the server does not.

    One process checks fields, for which clients wait, and others check files, which may take minutes.

    Args:
        state: The service's directory, in which the workers' errors are kept.
        data_cache: Where tokens are kept; None: the user's cache.
        workers: Processes that check files.
        command: Of a worker.
        seconds: How long a check of fields may take. One of files may take ten times as long, and a second for each
            50 kB.
    """

    def __init__(
        self,
        state: Path,
        data_cache: Path | None = None,
        workers: int = 1,
        command: Sequence[str] = WORKER,
        seconds: float = 60.0,
    ) -> None:
        self._log_path = state / "checker.log"
        self._cache = data_cache
        self._command = command
        self._counts: dict[Work, int] = {"fields": 1, "files": workers}
        self._seconds = seconds
        self._idle: dict[Work, asyncio.Queue[_Worker]] = {}
        self._workers: list[_Worker] = []
        self._starting: list[asyncio.Task[None]] = []
        self._errors: BinaryIO | None = None

    async def start(self) -> None:
        """Start the processes. They are not waited for: a check waits until one is ready."""
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._errors = os.fdopen(log, "wb")
        for work, count in self._counts.items():
            self._idle[work] = asyncio.Queue()
            for _ in range(count):
                worker = _Worker([*self._command, work], self._errors)
                self._workers.append(worker)
                self._starting.append(asyncio.create_task(self._warm(work, worker)))

    async def check_fields(self, backbone: Path, task: dict[str, Any]) -> list[Fault]:
        """Everything that is wrong with a task, its files aside.

        Args:
            backbone: Directory of the backbone.
            task: As `jobs.fields.to_task` makes it.

        Raises:
            CheckError: The check broke down.
        """
        return _faults(await self._ask("fields", backbone, task, self._seconds))

    async def check_files(self, backbone: Path, task: dict[str, Any]) -> Checked:
        """Tokenise and check a task's files.

        Args:
            backbone: Directory of the backbone.
            task: One in which `check_fields` found nothing.

        Raises:
            CheckError: The check broke down.
        """
        paths = [task[section]["path"] for section in ("data", "eval") if section in task]
        size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
        found = await self._ask("files", backbone, task, 10 * self._seconds + size / _SLOWEST)
        return Checked(_faults(found), **{key: value for key, value in found.items() if key != "faults"})

    async def close(self) -> None:
        """End the processes, whatever they do."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        if self._errors is not None:
            self._errors.close()

    async def _warm(self, work: Work, worker: _Worker) -> None:
        try:
            await worker.start()
        except CheckError as error:  # the first check that needs it tries again
            _log.warning("%s", error)
        self._idle[work].put_nowait(worker)

    async def _ask(self, work: Work, backbone: Path, task: dict[str, Any], seconds: float) -> dict[str, Any]:
        request = {"do": work, "backbone": str(backbone), "task": task}
        line = json.dumps({**request, "cache": str(self._cache) if self._cache else None}).encode() + b"\n"
        name, wrong = task.get("name"), ""
        worker = await self._idle[work].get()
        try:
            for _ in range(_TRIES):
                await worker.start()
                try:
                    found = await worker.ask(line, seconds)
                except _LostError as error:
                    _log.warning("%s: the process that checks its %s was lost: %s", name, work, error)
                    wrong = f"the {work} of the job could not be checked: the check {error}"
                    if error.slow and work == "files":
                        break  # others wait, and it would take as long again
                    continue
                if found.get("failed"):
                    raise CheckError(f"{name}: checking its {work} failed: see {self._log_path}")
                return found
        finally:
            self._idle[work].put_nowait(worker)
        param = "training_file" if work == "files" else None
        return {"faults": [(wrong, param, f"invalid_{param}" if param else "invalid_value")]}


def _faults(found: dict[str, Any]) -> list[Fault]:
    return [Fault(*fault) for fault in found["faults"]]


class CheckError(Exception):
    """A check broke down, whatever is checked: no process starts, or it met a mistake of ours."""


class _LostError(Exception):
    """A worker died, or took too long (`slow`)."""

    def __init__(self, text: str, slow: bool = False) -> None:
        super().__init__(text)
        self.slow = slow


class _Worker:
    """A process that answers one request at a time; it is started when it is needed."""

    def __init__(self, command: Sequence[str], errors: BinaryIO) -> None:
        self._command = command
        self._errors = errors
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Have the process ready for requests.

        Raises:
            CheckError: It does not become ready.
        """
        if self._process is not None and self._process.returncode is None:
            return
        # One thread, and no accelerator: those are the engines'.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                limit=_LONGEST_ANSWER,
                start_new_session=True,  # an interrupt from a terminal is for the server, which then ends it
            )
            await self.ask(b"", _SECONDS_TO_START)
        except (OSError, _LostError) as error:
            raise CheckError(f"a process that checks jobs does not start: {error}") from error

    async def ask(self, line: bytes, seconds: float) -> dict[str, Any]:
        """The answer to a request.

        Args:
            line: The request; empty: the process says something by itself.
            seconds: How long it may take.

        Raises:
            _LostError: There is none; the process is gone then.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(line)
                await process.stdin.drain()
                reply = await process.stdout.readline()
            answer: dict[str, Any] = json.loads(reply)
        except TimeoutError:
            await self.end()
            raise _LostError(f"took more than {seconds:.0f} s", slow=True) from None
        except (OSError, ValueError) as error:  # an empty line is no JSON
            await self.end()
            raise _LostError("ended without an answer") from error
        except asyncio.CancelledError:  # its answer would be taken for that to the next request
            await self.end()
            raise
        return answer

    async def end(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
