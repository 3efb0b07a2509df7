"""Calls functions in a process of its own, to which no GPU is visible: a fake GPU does not affect the caller.

Importing torch and transformers takes seconds. One process does so for all calls, and can start early.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from megatron_mux.errors import UserError

_SECONDS = 120.0

P = ParamSpec("P")
Result = TypeVar("Result")


class WorkerError(RuntimeError):
    """A call failed, took too long, or lost its process; the message says why."""


class LostProcess(WorkerError):
    """A call's process ended before it was done."""


class Worker:
    """A process that calls functions one after the other; leaving the context ends it and all that it has started."""

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._process: _Process | None = None
        self._calls = ThreadPoolExecutor(1)
        self._lock, self._is_over = Lock(), False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._calls.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_over = True
            if self._process is not None:
                self._process.end()
        self._calls.shutdown()
        if self._process is not None:
            self._process.close()

    def start(self, module: str) -> None:
        """Start the process, which imports a module while the caller goes on."""
        self.submit(_imported, module)

    def submit(self, function: Callable[P, Result], *arguments: P.args, **named: P.kwargs) -> Future[Result]:
        """Call a function of a module in the process, after the calls submitted before. Any thread may do so.

        Returns:
            The result, or a UserError if the function raises one, or a WorkerError if it fails otherwise. After its
            process is lost, the next call starts another one, also if it waits already.
        """
        return self._calls.submit(self._call, function, arguments, named)

    def _call(self, function: Callable[..., Any], arguments: Any, named: Any) -> Any:
        with self._lock:
            if self._is_over:
                raise LostProcess("the calls of its process have been ended")
            if self._process is None or self._process.has_ended:
                self._process = _Process(self._seconds)
        return self._process.call(function, arguments, named)


class _Process:
    """The process, its connection, and a file with what it prints."""

    def __init__(self, seconds: float) -> None:
        self.has_ended = False
        self._seconds = seconds
        self._printed = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=theirs.fileno(),
            stdout=self._printed,
            stderr=self._printed,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # a group of its own: its forks end with it
        )
        theirs.close()

    def call(self, function: Callable[..., Any], arguments: Any, named: Any) -> Any:
        """Call a function there, and raise here what it raises."""
        try:
            self._connection.send((function, arguments, named))
            if not self._connection.poll(self._seconds):
                self.end()
                raise WorkerError(f"it took longer than {self._seconds:g} s")
            result, error = self._connection.recv()
        except (EOFError, OSError):
            raise LostProcess(self._last_words) from None
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Kill the process and its forks."""
        self.has_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Free what is left of a process that has ended."""
        self._connection.close()
        self._printed.close()

    @cached_property
    def _last_words(self) -> str:
        """Why the process ended: a signal, perhaps the kernel's when memory ran out, or the last line it printed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode or 0
        self.end()
        with self._printed as printed:
            printed.seek(0)
            words = [line.strip() for line in printed if line.strip()]
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return words[-1] if words else "it said nothing"


def serve() -> None:
    """Answer calls from standard input until it closes."""
    calls = Connection(0)
    while True:
        try:
            function, arguments, named = calls.recv()
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            answer = function(*arguments, **named), None
        except UserError as error:
            answer = None, error
        except WorkerError as error:  # not of its own class, whose module may import torch
            answer = None, WorkerError(str(error))
        except Exception as error:  # models raise whatever they do without values
            answer = None, WorkerError(f"{type(error).__name__}: {one_line(error)}")
        calls.send(answer)


def one_line(error: Exception) -> str:
    """The message of an error in one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _imported(module: str) -> None:
    import_module(module)
