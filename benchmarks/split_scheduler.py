"""How long a decision of the split server's scheduler takes with 1,000 requests waiting.

python benchmarks/split_scheduler.py [--waiting 1000] [--output FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

_EVENTS = 20_000
_CAPACITY = 10**9


def seconds_of_decisions(easy: bool, waiting: int) -> list[float]:
    """Seconds of each decision while requests of random sizes end and others arrive."""
    from megatron_mux.split.scheduler import Demand, Scheduler, SchedulerOptions

    scheduler, random_ = Scheduler(_CAPACITY, SchedulerOptions(easy=easy)), random.Random(0)
    running: list[int] = []
    found = []
    key, now = 0, 0.0
    for _ in range(_EVENTS):
        while scheduler.waiting < waiting:
            key += 1
            size = random_.randint(_CAPACITY // 1000, _CAPACITY // 10)
            scheduler.submit(
                Demand(key, f"client {key % waiting}", size, 64, expected_s=random_.random()), now
            )
        now += 0.001
        began = time.perf_counter()
        granted = scheduler.grant(now)
        found.append((time.perf_counter() - began) / max(1, len(granted)))
        running += [demand.key for demand in granted]
        if running:
            scheduler.release(running.pop(random_.randrange(len(running))), now)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and publish."""
    parser = command_line(__doc__)
    parser.add_argument("--waiting", type=int, default=1000, metavar="N", help="requests that wait (1000)")
    add_output(parser)
    arguments = parser.parse_args(argv)
    rows, result = [], {}
    for name, easy in (("Algorithm 2", False), ("with a reservation of the first (EASY)", True)):
        found = sorted(seconds_of_decisions(easy, arguments.waiting))
        mean, p99 = statistics.mean(found), found[int(0.99 * len(found))]
        result[name] = {"mean_s": mean, "p99_s": p99}
        rows.append((name, f"{1e6 * mean:.1f}", f"{1e6 * p99:.1f}"))
    head = f"{arguments.waiting} requests wait; {_EVENTS} events."
    publish(result, "\n".join([head, "", *table("scheduler | mean, us | p99, us", rows)]), arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
