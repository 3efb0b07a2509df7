"""Python processes that start with the heavy imports done: a server imports once and forks.

Importing Megatron-Core, transformers and peft takes ten seconds of processor time, and tests start a hundred processes.

- `Server` starts the server, `start` starts a process from it, and `Process` waits for it or ends it.
- The file that `Server.python` names takes `python`'s place on a command line (`[python, "-m", "module", ...]`, a
  script, or `-c`). The process it starts has its arguments, environment, working directory and standard streams, gets
  the signals it gets, and is killed when it is killed; it ends as that process ends. In that process `sys.executable`
  is the file again, so that what torchrun starts is warm, too.

What a test is to see of a cold start (what gets imported, how long that takes) starts `sys.executable`: in tests, which
`run.py` starts warm themselves, `tests/conftest.py` makes that the interpreter again (`COLD`).
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self

VARIABLE = "WARM_PYTHON"
"""Environment variable: the file that takes `python`'s place, of a server that is running already."""

COLD = "COLD_PYTHON"
"""Environment variable of warm processes: the interpreter."""

_ROOT = Path(__file__).resolve().parents[1]
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SHORTEST, _WANTED = 64, 1 << 20  # bytes of a request


class Process:
    """A process that the server forked.

    Args:
        connection: To the server; the process is killed when it closes.

    Attributes:
        pid: Its id.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._line())

    def wait(self) -> int:
        """Wait for its end; returns its status, negative for the signal that killed it."""
        status = int(self._line())
        self._connection.close()
        return status

    def _line(self) -> str:
        line = self._lines.readline()
        if not line:
            raise RuntimeError("the server of warm processes ended unexpectedly")
        return line


def start(
    address: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int] = (0, 1, 2),
    directory: str | Path = _ROOT,
) -> Process:
    """Start a process.

    Args:
        address: Path of the server's socket.
        arguments: What would follow `python` on a command line.
        environment: All of its environment.
        streams: File descriptors that become its standard input, output and error.
        directory: Its working directory.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = {"arguments": list(arguments), "environment": dict(environment), "directory": str(directory)}
    content = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
    connection.sendmsg([len(content).to_bytes(8, "big")], rights)
    connection.sendall(content)
    return Process(connection)


class Server:
    """The server, while it is entered: one that is running already (`VARIABLE`), or a new one.

    Attributes:
        python: The file that takes `python`'s place.
        address: Path of its socket.
    """

    def __enter__(self) -> Self:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if VARIABLE in os.environ:
            self.python = os.environ[VARIABLE]
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="warm-")
            self.python = str(Path(self._folder.name) / "python")
            self._start()
        self.address = str(Path(self.python).with_name("socket"))
        return self

    def _start(self) -> None:
        client = f"#!{sys.executable} -IS\nimport sys\nsys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        client += f"import warm\nsys.exit(warm.client({str(Path(self.python).with_name('socket'))!r}))\n"
        Path(self.python).write_text(client)
        Path(self.python).chmod(0o755)
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", VARIABLE: self.python}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        # Connections are accepted from now on, and answered once everything is imported.
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(Path(self.python).with_name("socket")))
            listening.listen(64)
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.warm", str(listening.fileno())],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
            )

    def __exit__(self, *error: object) -> None:
        if self._folder is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=60)
            self._folder.cleanup()


def client(address: str) -> int:
    """What `Server.python` does; returns its exit status."""
    started: list[Process] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(started[0].pid, number)
        else:
            early.append(number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    started.append(start(address, sys.argv[1:], os.environ, directory=os.getcwd()))
    for missed in early:
        os.kill(started[0].pid, missed)
    status = started[0].wait()
    if status < 0:  # end as it ended
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
        time.sleep(5)
    return status


class _Connections:
    """The server's side: who asked for which process."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.of_process: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Fork for whoever connects, until standard input ends."""
        wakeup, ended = socket.socketpair()
        for end in (wakeup, ended):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: who started the server ends it
        for source in (self.listening, ended):
            self.selector.register(source, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    self._kill_all()
                    return
                if key.fileobj is ended:
                    ended.recv(4096)
                    self._tell_ends()
                elif key.fileobj is self.listening:
                    self._accept()
                else:
                    self._gone(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        connection, _ = self.listening.accept()
        try:
            request, streams = _receive(connection)
        except (OSError, ValueError):  # it died before it had said what it wants
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            os.setsid()
            for number in (signal.SIGCHLD, signal.SIGINT):
                signal.signal(
                    number, signal.SIG_DFL if number == signal.SIGCHLD else signal.default_int_handler
                )
            self.selector.close()
            for other in (self.listening, connection, *self.of_process.values()):
                other.close()
            _become(request, streams)
        for stream in streams:
            os.close(stream)
        self.of_process[pid] = connection
        self.selector.register(connection, selectors.EVENT_READ)
        _send(connection, pid)

    def _tell_ends(self) -> None:
        """Tell of processes that have ended."""
        for pid, connection in list(self.of_process.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _send(connection, os.waitstatus_to_exitcode(status))
                self._forget(pid)

    def _gone(self, connection: socket.socket) -> None:
        """Whoever asked for a process is gone: it goes, too."""
        for pid, own in list(self.of_process.items()):
            if own is connection:
                _kill(pid)
                os.waitpid(pid, 0)
                self._forget(pid)

    def _forget(self, pid: int) -> None:
        connection = self.of_process.pop(pid)
        self.selector.unregister(connection)
        connection.close()

    def _kill_all(self) -> None:
        for pid in self.of_process:
            _kill(pid)


def _kill(pid: int) -> None:
    """Kill a process and what is left of its group; before it made one of its own, itself."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more: `_gone` follows
        connection.sendall(f"{number}\n".encode())


def _receive(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """A request and the standard streams."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, content = int.from_bytes(head, "big"), b""
    while len(content) < size:
        part = connection.recv(min(_WANTED, size - len(content)))
        if not part:
            raise ValueError("cut off")
        content += part
    if len(streams) != 3:
        raise ValueError("without standard streams")
    return json.loads(content), list(streams)


def _become(request: Mapping[str, object], streams: Sequence[int]) -> None:
    """In the fork: be `python ARGUMENTS`, to its end."""
    import atexit
    import threading
    import traceback

    status = 1
    try:
        for place, stream in enumerate(streams):
            os.dup2(stream, place)
            os.close(stream)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, "w" if number else "r", buffering=1, closefd=False)  # noqa: SIM115
            for number in range(3)
        )
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
        own = {COLD: sys.executable, VARIABLE: os.environ[VARIABLE]}
        sys.executable = own[VARIABLE]
        os.environ.clear()
        os.environ.update({**request["environment"], **own})  # type: ignore[dict-item]
        os.chdir(str(request["directory"]))
        _run(list(request["arguments"]))  # type: ignore[call-overload]
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:  # what the interpreter would print
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for printed in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                printed.flush()
        os._exit(status & 0xFF)


def _run(words: list[str]) -> None:
    """Run what a command line of Python says."""
    import runpy
    import warnings

    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *added, *(path for path in sys.path[1:] if path not in (str(_ROOT), *added))]
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]
    kind, *rest = words
    if kind == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(os.path.abspath(kind), run_name="__main__")


def _imports() -> None:
    """Everything that a run imports, so that a fork starts with it; its garbage collector leaves that alone."""
    import gc

    import torch

    torch.set_num_threads(1)
    import megatron.core.models.gpt  # noqa: F401
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.run
    import transformers  # noqa: F401

    import megatron_mux.training.run  # noqa: F401

    # A full collection would look at a million objects, and in a fork copy the pages they lie on.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _imports()
    _Connections(socket.socket(fileno=int(sys.argv[1]))).serve()
    os._exit(0)  # leaving torch takes seconds
