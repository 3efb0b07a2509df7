"""How long a decision of the split server's scheduler takes with 1,000 requests waiting.

python benchmarks/split_scheduler.py [--waiting 1000] [--output FILE]

A decision is all that an event takes: a request that comes, or one that ends, and whatever is granted then. Those in
which the first in the queue fits, so that others are looked for behind it, are told apart from those in which it does
not. Seconds are CPU time. Every round makes the same decisions: with more of them, the least of each one's seconds
leaves out what else the machine does.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.split.server.scheduler import SchedulerOptions

_EVENTS = 20_000
_CAPACITY = 10**9


def seconds_of_decisions(options: SchedulerOptions, waiting: int) -> dict[str, list[float]]:
    """Seconds of decisions while requests of random sizes end and others come, by whether the first one fits."""
    from megatron_mux.split.server.scheduler import Demand, Scheduler

    scheduler, random_ = Scheduler(_CAPACITY, options), random.Random(0)
    running: list[int] = []
    found: dict[str, list[float]] = {"the first fits": [], "it does not": []}
    key, now = 0, 0.0
    while sum(map(len, found.values())) < _EVENTS:
        now += 0.001
        if comes := scheduler.waiting < waiting or not running:
            key += 1
            size, seconds = random_.randint(_CAPACITY // 1000, _CAPACITY // 10), random_.random()
            demand = Demand(key, f"client {key % waiting}", size, 64, expected_s=seconds, keeps=size // 100)
        else:
            ended = running.pop(random_.randrange(len(running)))
        began = time.thread_time()
        if comes:
            scheduler.submit(demand, now)
        else:
            scheduler.release(ended, now)
        granted = scheduler.grant(now)
        seconds = time.thread_time() - began
        if scheduler.waiting >= waiting - 100:  # from when the queue is full
            found["the first fits" if granted else "it does not"].append(seconds)
        running += [demand.key for demand in granted]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--waiting", type=int, default=1000, metavar="N", help="requests that wait (1000)")
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="count each decision's least seconds (1)"
    )
    add_output(parser)
    arguments = parser.parse_args(argv)
    from megatron_mux.split.server.scheduler import SchedulerOptions

    cases = {
        "Algorithm 2": SchedulerOptions(),
        "with a reservation of the first (EASY)": SchedulerOptions(easy=True),
        "EASY, weights, ageing, rate limits": SchedulerOptions(True, {"client 1": 2.0}, 1.0, 1e9),
    }
    rows, result = [], {}
    for name, options in cases.items():
        rounds = [seconds_of_decisions(options, arguments.waiting) for _ in range(arguments.rounds)]
        for which in rounds[0]:
            found = [min(seconds) for seconds in zip(*(own[which] for own in rounds), strict=True)]
            if len(found) > 1:
                mean, p99 = statistics.mean(found), statistics.quantiles(found, n=100)[98]
                result[f"{name}: {which}"] = {"mean_s": mean, "p99_s": p99, "decisions": len(found)}
                rows.append((name, which, len(found), f"{1e6 * mean:.1f}", f"{1e6 * p99:.1f}"))
    head = f"{arguments.waiting} requests wait; {_EVENTS} decisions, {arguments.rounds} rounds."
    columns = "scheduler | first in the queue | decisions | mean, us | p99, us"
    publish(result, "\n".join([head, "", *table(columns, rows)]), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
