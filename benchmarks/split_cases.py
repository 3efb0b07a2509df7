"""One case of `split.py`: a policy and a number of clients, measured while all of them train."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from split_processes import Cast, Worker, until_true

PORT = 7070
_JOINING_S = 120.0


def measure_case(
    cast: Cast,
    policy: str,
    clients: int,
    steps: int,
    most_s: float,
    paths: tuple[Path, Path],
    flags: Sequence[str],
    ranks: int = 1,
) -> dict[str, Any]:
    """Measure a case.

    The measurement begins when every client has done its first step, and ends when each has done `steps` more, or after
    `most_s` seconds.

    Args:
        cast: Starts processes.
        policy: Of the server.
        clients: How many.
        steps: Of each client.
        most_s: Longest time.
        paths: Model, and certificates.
        flags: More flags of the server.
        ranks: Pipeline ranks of the server.
    """
    server = cast.server("server", *paths, PORT, ["--policy", policy, *flags], ranks)
    workers = [cast.client(i, "client", *paths, [PORT]) for i in range(clients)]
    everyone = [server, *workers]
    until_true(lambda: all(one.lines() for one in workers), _JOINING_S, everyone, "serve a first step")
    server.signal(signal.SIGUSR1)
    began = time.monotonic()

    def is_done() -> bool:
        return time.monotonic() > began + most_s or all(
            len(steps_of(one.lines(), began)) >= steps for one in workers
        )

    until_true(is_done, most_s + 60, everyone, "serve", pause=0.3)
    ended = time.monotonic()
    served = _figures_of(server, everyone)
    found = case_figures([one.lines() for one in workers], began, ended)
    return {"policy": policy, "clients": clients, "ranks": ranks, "seconds": ended - began, **served, **found}


def _figures_of(server: Worker, everyone: Sequence[Worker]) -> dict[str, Any]:
    server.signal(signal.SIGUSR2)
    until_true(server.file.is_file, 30, everyone, "write its figures")
    figures: dict[str, Any] = json.loads(server.file.read_text())
    return {key: figures[key] for key in ("most_reserved", "capacity")}


def steps_of(lines: Sequence[Mapping[str, Any]], began: float) -> list[dict[str, Any]]:
    """Steps that began after a time: seconds, and what they went to."""
    found = []
    for before, line in zip(lines, lines[1:], strict=False):
        if before["ended"] < began:
            continue
        own = {key: line[key] - before[key] for key in ("cpu_s", "requests_s", "waited_s", "computed_s")}
        seconds = line["ended"] - before["ended"]
        found.append({**own, "step_s": seconds, "ended": line["ended"], "waits": line["waits"]})
    return found


def case_figures(
    clients: Sequence[Sequence[Mapping[str, Any]]], began: float, ended: float
) -> dict[str, Any]:
    """The figures of a case.

    If some client has not ended two whole steps, the means of those that have ended would leave out the longest: then
    a step is taken to last as long as the clients' number divided by the steps that all of them take a second (Little's
    law: every client always has one step to do), and to wait for what its other parts leave.

    Args:
        clients: Lines of each client.
        began, ended: When it was measured.
    """
    every = [steps_of(lines, began) for lines in clients]
    flat = [step for steps in every for step in steps if step["ended"] <= ended]
    # Parts other than waiting do not depend on when a step began: all steps that ended count.
    parts = flat or [step for lines in clients for step in steps_of(lines, 0.0)[-1:]]
    mean = {
        key: statistics.fmean(one[key] for one in parts) for key in parts[0] if key not in ("waits", "ended")
    }
    ends = sorted(line["ended"] for lines in clients for line in lines if began <= line["ended"] <= ended)
    is_whole = all(len(steps) >= 2 for steps in every)
    communication = mean["requests_s"] - mean["waited_s"] - mean["computed_s"]
    at_client = mean["step_s"] - mean["requests_s"]
    step_s = mean["step_s"]
    if not is_whole and len(ends) > 1:
        step_s = len(clients) * (ends[-1] - ends[0]) / (len(ends) - 1)
    waits = sorted(wait for step in flat for wait in step["waits"])
    rates = [len(steps) / sum(step["step_s"] for step in steps) for steps in every if steps]
    return {
        "step_s": step_s,
        "communication_s": communication,
        "computation_s": mean["computed_s"],
        "client_s": at_client,
        "client_cpu_s": mean["cpu_s"],
        "scheduling_s": step_s - communication - mean["computed_s"] - at_client,
        "p99_wait_s": waits[min(len(waits) - 1, int(0.99 * len(waits)))] if waits else None,
        "jain": jain(rates) if is_whole else None,
        "is_whole": is_whole,
        "steps": [len(steps) for steps in every],
        "steps_per_s": len(clients) / step_s,
    }


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has all."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))
