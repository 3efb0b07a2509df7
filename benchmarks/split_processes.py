"""Processes of `split.py`: a server and its clients, each in its namespace; they are killed when their context ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from split_network import Star

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from tests import warm

_WORKER = str(Path(__file__).with_name("split_worker.py"))
_STARTING_S = 120.0
_LAST_LINES = 20


class ProcessEnded(RuntimeError):
    """A process ended, or did not do what it was to do; says what it printed last."""


@dataclass(frozen=True)
class Worker:
    """A process.

    Attributes:
        name: What to call it.
        process: To end it.
        file: What it writes.
        printed: Its standard error.
        commands, answers: Of a process that takes commands.
    """

    name: str
    process: warm.Process
    file: Path
    printed: Path
    commands: IO[str]
    answers: IO[str]

    def signal(self, number: int) -> None:
        """Send a signal.

        Raises:
            ProcessEnded: It is gone.
        """
        try:
            os.kill(self.process.pid, number)
        except ProcessLookupError:
            raise self.failed("ended") from None

    def is_alive(self) -> bool:
        """Whether it runs still."""
        try:
            os.kill(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def failed(self, how: str) -> ProcessEnded:
        """An error that says what it printed."""
        lines = self.printed.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return ProcessEnded("\n".join([f"{self.name} {how}; it printed:", *(f"  {line}" for line in lines)]))

    def lines(self) -> list[dict[str, Any]]:
        """The lines of JSON that it has written."""
        if not self.file.is_file():
            return []
        whole = self.file.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def ask(self, command: dict[str, Any] | None = None) -> None:
        """Send a command."""
        with suppress(BrokenPipeError):  # `answer` says why
            self.commands.write(json.dumps(command) + "\n")
            self.commands.flush()

    def answer(self) -> Any:
        """Read the answer to the last command; the first is there when it has joined."""
        line = self.answers.readline()
        if not line:
            raise self.failed("ended")
        return json.loads(line)


@dataclass(frozen=True)
class Cast:
    """Starts processes of a case.

    Attributes:
        warm: Forks them.
        star: Their namespaces.
        folder: For what they write.
        cleanup: Kills them.
    """

    warm: warm.Server
    star: Star
    folder: Path
    cleanup: ExitStack

    def start(self, name: str, role: str, namespace: str, words: Sequence[str], **variables: str) -> Worker:
        """Start a process; see `split_worker.py`."""
        environment = {
            **os.environ,
            **variables,
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
            "OMP_NUM_THREADS": "1",
            "GRPC_VERBOSITY": "ERROR",
        }
        file, printed = self.folder / f"{name}.json", self.folder / f"{name}.log"
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        with printed.open("wb") as log:
            command = ["-W", "ignore", _WORKER, role, namespace, str(file), *words]
            streams = (in_read, out_write, log.fileno())
            process = warm.start(self.warm.address, command, environment, streams)
        os.close(in_read)
        os.close(out_write)
        worker = Worker(name, process, file, printed, os.fdopen(in_write, "w"), os.fdopen(out_read))
        self.cleanup.callback(_end, worker)
        return worker

    def server(
        self, name: str, model: Path, tls: Path, port: int, flags: Sequence[str], ranks: int = 1
    ) -> Worker:
        """Start a server on pipeline ranks, and wait until it serves."""
        words = ["--backbone", str(model), "--listen", f"0.0.0.0:{port}", "--no-progress"]
        words += ["--tls-dir", str(tls)]
        words += ["--max-memory-each", "1", "--save", str(self.folder / f"{name}-saves"), *flags]
        if ranks == 1:
            worker = self.start(name, "server", self.star.server, words)
        else:
            words += ["--pipeline-model-parallel-size", str(ranks)]
            shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
            shared |= {"GLOO_SOCKET_IFNAME": "lo"}
            worker, *_ = [
                self.start(
                    f"{name}-{i}", "server", self.star.server, words, RANK=str(i), LOCAL_RANK=str(i), **shared
                )
                for i in range(ranks)
            ]
        until_true(lambda: "serving" in worker.printed.read_text(), _STARTING_S, [worker], "serve")
        return worker

    def client(self, i: int, role: str, model: Path, tls: Path, ports: Sequence[int]) -> Worker:
        """Start a client."""
        addresses = [f"{self.star.address(i)}:{port}" for port in ports]
        name = f"client-{i}"
        return self.start(name, role, self.star.clients[i], [str(model), str(tls), name, *addresses])


@contextmanager
def cast(server: warm.Server, star: Star, folder: Path) -> Iterator[Cast]:
    """Context of a case's processes, which are killed at its end.

    Args:
        server: Forks processes.
        star: Their namespaces.
        folder: Where they write.
    """
    folder.mkdir(parents=True)
    with ExitStack() as cleanup:
        yield Cast(server, star, folder, cleanup)


def until_true(
    condition: Callable[[], bool], seconds: float, workers: Sequence[Worker], what: str, pause: float = 0.1
) -> None:
    """Wait until something has happened.

    Raises:
        ProcessEnded: A process ended meanwhile, or it took too long.
    """
    until = time.monotonic() + seconds
    while not condition():
        for worker in workers:
            if not worker.is_alive():
                raise worker.failed("ended")
        if time.monotonic() > until:
            raise workers[0].failed(f"did not {what} in {seconds:.0f} s")
        time.sleep(pause)


def _end(worker: Worker) -> None:
    with suppress(ProcessLookupError):
        os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    with suppress(BrokenPipeError):
        worker.commands.close()
    worker.answers.close()
