"""What needs torch, in a process of its own: a fake GPU does not touch this one, and a real GPU is out of its sight.

Importing torch and transformers takes seconds. One process does so for all that is asked, and can begin early.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Timer
from types import TracebackType
from typing import IO, Any, Self

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
        self._process: subprocess.Popen[str] | None = None
        self._opened = ExitStack()
        self._said: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end()

    def start(self) -> None:
        """Begin to import what tracing needs, which takes seconds: others can be used meanwhile."""
        if self._process is None:
            self._said = self._opened.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115  it is one
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_mux.memory.trace.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=without_gpu(),
            )

    def __call__(self, cases: Sequence[Case]) -> list[Stream]:
        """The streams of some cases.

        Raises:
            TraceError: It failed, or took longer. The next call begins with another process.
        """
        return [Stream.from_json(text) for text in self.ask([("trace", case.to_dict()) for case in cases])]

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

    def ask(self, requests: Sequence[Request]) -> list[Any]:
        """What the process answers, one after the other.

        Raises:
            UserError: The user's input is wrong.
            TraceError: It failed, or all took longer than it may. The next call begins with another process.
        """
        self.start()
        assert self._process is not None
        process, late = self._process, Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = Timer(self._seconds, expire)
        timer.start()
        try:
            return [self._answer(process, request) for request in requests]
        except OSError as error:
            word = self._end()
            raise TraceError(
                f"the trace took longer than {self._seconds:g} s" if late.is_set() else word
            ) from error
        finally:
            timer.cancel()

    def _answer(self, process: subprocess.Popen[str], request: Request) -> Any:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line.endswith("\n"):
            raise BrokenPipeError("the traced process has ended")
        found = json.loads(line)
        if "refused" in found:
            raise UserError(*found["refused"])
        if "failed" in found:
            raise TraceError(found["failed"])
        return found["answer"]

    def _end(self) -> str:
        """End the process, and return its last word."""
        process, self._process = self._process, None
        if process is None or self._said is None:
            return ""
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # it has ended, with something left to read
            process.stdin.close()
        process.kill()  # at most it waits for a further case
        process.wait()
        process.stdout.close()
        self._said.seek(0)
        words = [line for line in self._said.read().splitlines() if line.strip()]
        self._opened.close()
        return words[-1] if words else "it said nothing"


def without_gpu() -> dict[str, str]:
    """The environment of a process to which no GPU is visible."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
