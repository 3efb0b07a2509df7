"""Throughput of a saturated server with and without co-batching, by the size of requests."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from split_processes import Cast, Worker

_PORTS = (7071, 7072)
_SIDES = ("alone", "together")
_FLAGS = (("--no-co-batching",), ("--co-batching",))


def measure_together(
    cast: Cast, clients: int, sizes: Sequence[int], rounds: int, seconds: float, paths: tuple[Path, Path]
) -> dict[str, Any]:
    """Send requests as fast as they are answered, to two servers in turns.

    Clients have no layers, so that the server is saturated; both servers run all the time, and idle while it is the
    other's turn. Which one is first alternates.

    Args:
        cast: Starts processes.
        clients: How many.
        sizes: Rows of requests.
        rounds: Turns of each server for each size.
        seconds: Of a turn.
        paths: Model, and certificates.
    """
    limit = ("--memory-limit", "4GiB", "--log-format", "json")
    servers = [
        cast.server(side, *paths, port, [*limit, *flags])
        for side, port, flags in zip(_SIDES, _PORTS, _FLAGS, strict=True)
    ]
    workers = [cast.client(i, "requests", *paths, _PORTS) for i in range(clients)]
    for worker in workers:
        worker.answer()
    found = []
    for rows in sizes:
        rates: dict[str, list[float]] = {side: [] for side in _SIDES}
        for i in range(rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                rates[_SIDES[which]].append(rows * _pairs_per_second(workers, which, rows, seconds))
        ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
        found.append({"rows": rows, "rows_per_s": rates, "speed_up": ratio})
    return {"clients": clients, "most_together": _most_together(servers[1]), "sizes": found}


def _pairs_per_second(workers: Sequence[Worker], which: int, rows: int, seconds: float) -> float:
    """Pairs of a forward and a backward pass a second, until the last that was begun in the turn has ended."""
    began = time.monotonic()
    for worker in workers:
        worker.ask({"server": which, "rows": rows, "seconds": seconds})
    ended = [moment for worker in workers for moment in worker.answer()]
    return len(ended) / (max(ended) - began)


def _most_together(server: Worker) -> int:
    said = re.search(r'"computed_together_rows": (\d+)', server.printed.read_text())
    return int(said[1]) if said else 0
