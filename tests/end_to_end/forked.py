"""Real runs of `pretrain_mux.py`, each a process of its own, without paying for its imports each time.

A server process imports everything once and forks for each run; the child behaves as `python pretrain_mux.py` would.
It can be told to die or to meet an error at an exact place. The test process itself never forks: it holds a world.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """What is to go wrong in a run, at the `nth` call of a function.

    Attributes:
        function: `module:name` or `module:class.name`.
        nth: Which call, from 1.
        kind: `kill before`, `kill after`, `kill halfway` (the file it wrote is cut in half), `no space` (ENOSPC),
            `no memory` (torch's error), `forbidden` (it must not be called at all), `stop` (SIGSTOP), `stall` (it does
            not come back), `defect`.
    """

    function: str
    nth: int
    kind: str


@dataclass(frozen=True)
class Run:
    """How a run ended.

    Attributes:
        status: Exit status, negative for the signal that killed it.
        output, errors: What it printed.
        seconds: From fork to end.
    """

    status: int
    output: str
    errors: str
    seconds: float


@dataclass(frozen=True)
class Started:
    """A run under way.

    Attributes:
        pid: Its process; the id is its own until `Server.wait`.
        output, errors: Files with what it prints.
        began: When, by the monotonic clock.
    """

    pid: int
    output: Path
    errors: Path
    began: float


class Server:
    """Runs `pretrain_mux.py`; use as a context manager.

    Args:
        scratch: Where the output of runs is kept.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._runs = 0

    def __enter__(self) -> Server:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.end_to_end.forked"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def run(
        self,
        arguments: Sequence[str],
        fault: Fault | None = None,
        kill_after: float | Callable[[], bool] | None = None,
        signal_number: int = signal.SIGKILL,
        largest_file: int | None = None,
    ) -> Run:
        """Run to the end, whichever that is.

        Args:
            arguments: Of `pretrain_mux.py`.
            fault: What goes wrong.
            kill_after: Seconds until the run gets a signal, or a condition to wait for (looked at every 5 ms).
            signal_number: That signal.
            largest_file: Bytes that a file may grow to (a write beyond fails).
        """
        started = self.start(arguments, fault, largest_file)
        if callable(kill_after):
            while not kill_after() and time.monotonic() - started.began < 60:
                time.sleep(0.005)
        elif kill_after is not None:
            time.sleep(kill_after)
        if kill_after is not None:
            os.kill(started.pid, signal_number)
        return self.wait(started)

    def start(
        self,
        arguments: Sequence[str],
        fault: Fault | None = None,
        largest_file: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        """Start a run, beside others that are under way.

        Args:
            arguments, fault, largest_file: See `run`.
            environment: What is added to the environment.
        """
        self._runs += 1
        output, errors = (self.scratch / f"run-{self._runs}.{kind}" for kind in ("out", "err"))
        request = {
            "arguments": list(arguments),
            "fault": None if fault is None else vars(fault),
            "output": str(output),
            "errors": str(errors),
            "largest_file": largest_file,
            "environment": dict(environment or {}),
        }
        pid = self._ask(json.dumps(request))
        return Started(pid, output, errors, time.monotonic())

    def wait(self, started: Started) -> Run:
        """Wait for the end of a run."""
        status = self._ask(f"wait {started.pid}")
        seconds = time.monotonic() - started.began
        return Run(status, started.output.read_text(), started.errors.read_text(), seconds)

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._answer(self._process.stdout))

    @staticmethod
    def _answer(stream: IO[str]) -> str:
        line = stream.readline()
        if not line:
            raise RuntimeError("the server of forked runs ended unexpectedly")
        return line


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    # Everything that a run imports, so that a fork starts with it.
    import megatron.core.models.gpt  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    import megatron_mux.training.run  # noqa: F401

    for line in sys.stdin:
        if line.startswith("wait "):
            _, status = os.waitpid(int(line.split()[1]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        request = json.loads(line)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _child(request)
        print(pid, flush=True)


def _child(request: dict[str, Any]) -> None:
    status = 1
    try:
        for number, path in ((1, request["output"]), (2, request["errors"])):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
            os.close(handle)
        os.environ.update(request["environment"])
        if request["largest_file"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"], resource.RLIM_INFINITY))
        if request["fault"] is not None:
            _arm(Fault(**request["fault"]))
        import pretrain_mux

        try:
            status = pretrain_mux.main(request["arguments"])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:  # what the interpreter would print
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _arm(fault: Fault) -> None:
    import importlib

    module_name, path = fault.function.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    calls = 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != fault.nth:
            return original(*args, **kwargs)
        if fault.kind == "no space":
            raise OSError(28, os.strerror(28))
        if fault.kind == "no memory":
            import torch

            raise torch.OutOfMemoryError("a device's memory ran out")
        if fault.kind == "forbidden":
            raise AssertionError(f"{fault.function} was called")
        if fault.kind == "defect":
            raise RuntimeError("a defect of ours")
        if fault.kind == "stall":
            time.sleep(3600)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault.kind in ("kill after", "kill halfway"):
            original(*args, **kwargs)
        if fault.kind == "kill halfway":
            written = next(str(a) for a in (*args, *kwargs.values()) if isinstance(a, (str, Path)))
            os.truncate(written, os.path.getsize(written) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, faulty)


if __name__ == "__main__":
    _serve()
