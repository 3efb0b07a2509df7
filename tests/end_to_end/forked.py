"""Real runs of `pretrain_mux.py`, each a process of its own, that die or meet an error at an exact place if told so.

Imports are paid once: see `tests.warm`. The test process itself never forks: it holds a world.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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
        process: Its process.
        output, errors: Files with what it prints.
        began: When, by the monotonic clock.
    """

    process: warm.Process
    output: Path
    errors: Path
    began: float

    @property
    def pid(self) -> int:
        """Its process id, its own until `Server.wait`."""
        return self.process.pid


class Server(warm.Server):
    """Runs `pretrain_mux.py`; use as a context manager.

    Args:
        scratch: Where the output of runs is kept.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._runs = 0

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
            "largest_file": largest_file,
        }
        usual = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        with open(os.devnull) as nothing, open(output, "wb") as out, open(errors, "wb") as err:
            process = warm.start(
                self.address,
                ["-m", "tests.end_to_end.forked", json.dumps(request)],
                {**inherited, **usual, **(environment or {})},
                [stream.fileno() for stream in (nothing, out, err)],
            )
        return Started(process, output, errors, time.monotonic())

    def wait(self, started: Started) -> Run:
        """Wait for the end of a run."""
        status = started.process.wait()
        seconds = time.monotonic() - started.began
        return Run(status, started.output.read_text(), started.errors.read_text(), seconds)


def _child(request: dict[str, Any]) -> int:
    """In the fork: run the script."""
    if request["largest_file"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["largest_file"], resource.RLIM_INFINITY))
    if request["fault"] is not None:
        _arm(Fault(**request["fault"]))
    import pretrain_mux

    return pretrain_mux.main(request["arguments"])


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
            return original(*args, **kwargs)
        if fault.kind in ("kill after", "kill halfway"):
            original(*args, **kwargs)
        if fault.kind == "kill halfway":
            written = next(str(a) for a in (*args, *kwargs.values()) if isinstance(a, (str, Path)))
            os.truncate(written, os.path.getsize(written) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, faulty)


if __name__ == "__main__":
    sys.exit(_child(json.loads(sys.argv[1])))
