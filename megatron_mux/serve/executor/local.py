"""Instances on this machine: a process each, or a group that torchrun starts. They outlive the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_mux.serve.executor.executor import Handle, Launch

_MARK = "MEGATRON_MUX_INSTANCE"
"""A variable that all processes of an instance have, whatever started them: by its value they are found again."""


class LocalExecutor:
    """Starts instances as sessions of their own, so that what ends the server does not end them.

    Args:
        root: Directory of the service.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, launch: Launch) -> Handle:
        """See `Executor`."""
        words = ["-m", "megatron_mux.cli", "serve-instance", *launch.words]
        if launch.processes > 1:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={launch.processes}"]
            words = [*torchrun, *words]
        mark = f"{self._root}/{launch.name}"
        with open(launch.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, **launch.environment, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(process)
        return {"pid": process.pid, "mark": mark}

    def stop(self, handle: Handle, kill: bool = False) -> None:
        """See `Executor`."""
        found = list(_processes(str(handle["mark"])))
        if not kill:  # torchrun passes it on to ranks
            found = [pid for pid in found if pid == handle["pid"]]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kill else signal.SIGTERM)

    def exited(self, handle: Handle) -> bool:
        """See `Executor`."""
        self._children = [child for child in self._children if child.poll() is None]  # no zombies stay
        return next(_processes(str(handle["mark"])), None) is None


def _processes(mark: str) -> Iterator[int]:
    """Yield the processes of an instance."""
    wanted = f"{_MARK}={mark}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if wanted in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)
