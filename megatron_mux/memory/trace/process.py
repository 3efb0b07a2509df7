"""What needs torch, in a process of its own: a fake GPU does not touch this one, and a real GPU is out of its sight.

Importing torch and transformers takes seconds. One process does so for all that is asked, and can begin early.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Self

from megatron_mux.errors import UserError
from megatron_mux.memory.stream.events import Stream
from megatron_mux.memory.trace.case import Case

_SECONDS = 120.0

Request = tuple[str, Mapping[str, Any]]
"""What is asked, a name of `worker.ANSWERS`, and about what, as JSON has it."""


class TraceError(RuntimeError):
    """A trace that did not come about: the message is the traced process's last word."""


class Tracer:
    """Traces cases in one process, begun with the first of them or by `start`; a context that ends it.

    Args:
        seconds: How long the traces that are asked for at once may take.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._worker: _Worker | None = None
        self._begun: dict[str, Future[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    def start(self) -> None:
        """Begin to import what tracing needs, which takes seconds: others can be used meanwhile."""
        if self._worker is None:
            self._worker = _Worker()

    def begin_trace(self, case: Case) -> None:
        """Begin with a case that will be asked for later."""
        self.begin(_traced(case))

    def begin(self, request: Request) -> None:
        """Begin with what will be asked later."""
        key = json.dumps(request)
        if key not in self._begun:
            self._begun[key] = self._submit(key)

    def __call__(self, cases: Sequence[Case]) -> Iterator[Stream]:
        """The streams of some cases, each as soon as it is there; the next are traced meanwhile.

        Raises:
            TraceError: It failed, or took longer. The next call begins with another process.
        """
        return map(Stream.from_json, self.ask([_traced(case) for case in cases]))

    def sizes(self, config: Path) -> str:
        """A model's sizes by its config.json, as `ModelTensors.to_json` has them.

        Raises:
            UserError: It is not the config of a causal language model, or the process failed.
        """
        try:
            (text,) = self.ask([("sizes", {"config": str(config)})])
        except TraceError as error:
            raise UserError(f"{config}: its sizes cannot be told: {error}") from None
        return str(text)

    def ask(self, requests: Sequence[Request]) -> Iterator[Any]:
        """What the process answers, one after the other, each as soon as it is there.

        Raises:
            UserError: The user's input is wrong.
            TraceError: It failed, or all took longer than it may. The next call begins with another process.
        """
        keys = [json.dumps(request) for request in requests]
        futures = [self._begun.pop(key) if key in self._begun else self._submit(key) for key in keys]
        return self._answers(futures, time.monotonic() + self._seconds)

    def _answers(self, futures: Sequence[Future[Any]], until: float) -> Iterator[Any]:
        for future in futures:
            try:
                yield future.result(max(0.0, until - time.monotonic()))
            except TimeoutError as error:
                self._end()
                raise TraceError(f"the trace took longer than {self._seconds:g} s") from error
            except EOFError as error:
                raise TraceError(self._end()) from error

    def _submit(self, request: str) -> Future[Any]:
        self.start()
        assert self._worker is not None
        return self._worker.submit(request)

    def _end(self) -> str:
        """End the process, and return its last word."""
        worker, self._worker, self._begun = self._worker, None, {}
        return "" if worker is None else worker.end()


class _Worker:
    """The process, and a thread that hands its answers to those who wait for them."""

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_mux.memory.trace.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=without_gpu(),
        )
        self._waiting: deque[Future[Any]] = deque()
        self._lock = Lock()
        self._has_ended = False
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def submit(self, request: str) -> Future[Any]:
        """Ask; the future fails with EOFError if the process ends before it answers."""
        assert self._process.stdin is not None
        future: Future[Any] = Future()
        with self._lock:
            if self._has_ended:
                future.set_exception(EOFError())
                return future
            self._waiting.append(future)
        with suppress(OSError):  # it has ended, as the reader will find
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        return future

    def end(self) -> str:
        """End the process, and return its last word."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # it has ended, with something left to read
            self._process.stdin.close()
        killed = self._killed()
        self._process.kill()  # at most it waits for a further case
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        with self._said as said:
            said.seek(0)
            words = [line for line in said.read().splitlines() if line.strip()]
        return killed or (words[-1] if words else "it said nothing")

    def _killed(self) -> str | None:
        """What is to be said of a process that something else has ended: perhaps the kernel, when memory ran out."""
        if not self._has_ended:
            return None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.returncode
        return None if code is None or code >= 0 else f"its process was ended by {signal.Signals(-code).name}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):  # killed while it wrote
                break
            found, future = json.loads(line), self._waiting.popleft()
            if "refused" in found:
                future.set_exception(UserError(*found["refused"]))
            elif "failed" in found:
                future.set_exception(TraceError(found["failed"]))
            else:
                future.set_result(found["answer"])
        with self._lock:
            self._has_ended = True
            for future in self._waiting:
                future.set_exception(EOFError())


def _traced(case: Case) -> Request:
    return "trace", case.to_dict()


def without_gpu() -> dict[str, str]:
    """The environment of a process to which no GPU is visible."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
