"""Runs of several ranks, each forked from the server, started as `srun` would: no launcher looks after them."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence

from tests.end_to_end.forked import Fault, Run, Server


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
