"""Runs of several ranks, each forked from the server, started as `srun` would: no launcher looks after them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import warm
from tests.end_to_end.forked import Fault, Run, Server

_ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    server: Server,
    arguments: Sequence[str],
    ranks: int,
    faults: Mapping[int, Fault] | None = None,
    limit: float = 100.0,
) -> list[Run]:
    """A run on several ranks, to its end.

    Args:
        server: Forks them.
        arguments: Of `pretrain_mux.py`.
        ranks: Processes.
        faults: What goes wrong, by rank. A rank that is to stop is killed once the others have ended.
        limit: Seconds until those that are still there are killed.

    Returns:
        How each rank ended.
    """
    faults = faults or {}
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = [
        server.start(
            arguments, faults.get(rank), environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    waiting = {run.pid for run in started}

    def kill() -> None:
        for pid in list(waiting):
            os.kill(pid, signal.SIGKILL)

    guard = threading.Timer(limit, kill)
    guard.start()
    runs: dict[int, Run] = {}
    stopped = [rank for rank in range(ranks) if rank in faults and faults[rank].kind == "stop"]
    for rank in sorted(range(ranks), key=lambda rank: rank in stopped):
        if rank in stopped:
            os.kill(started[rank].pid, signal.SIGKILL)
        runs[rank] = server.wait(started[rank])
        waiting.discard(started[rank].pid)
    guard.cancel()
    return [runs[rank] for rank in range(ranks)]


def run_tool(server: warm.Server, tool: str, words: Sequence[object], ranks: int) -> tuple[list[int], str]:
    """A script of `tools/` on several ranks, to its end.

    Args:
        server: Forks them.
        tool: The script's name.
        words: Its arguments.
        ranks: Processes.

    Returns:
        Their exit statuses, and what they printed as errors.
    """
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    script = ["-W", "ignore", str(_ROOT / f"tools/{tool}.py"), *map(str, words)]
    null = os.open(os.devnull, os.O_RDWR)
    read, write = os.pipe()
    running = [
        warm.start(
            server.address,
            script,
            {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            (null, null, write),
        )
        for rank in range(ranks)
    ]
    os.close(write)
    os.close(null)
    with os.fdopen(read) as errors:
        said = errors.read()
    return [process.wait() for process in running], said
