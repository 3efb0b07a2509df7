"""The planner's search over layouts against all there are, on made-up costs.

python benchmarks/planner.py                    # 60 instances of up to eight tasks, then 64 tasks on 8 stages
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from pathlib import Path

from script import command_line

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.fusion.grouping import balanced, every_grouping, imbalance
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner import Planner
from megatron_mux.fusion.planning_context import PlanningContext
from megatron_mux.fusion.search import DoesNotFitError, exhaustive, plain_equation_6, search
from tests.unit.fusion import backbone
from tests.unit.fusion.synthetic import Synthetic, synthetic

COUNTS = (1, 2, 4, 8)


def main() -> int:
    """Print the gaps and the time."""
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=60)
    arguments = parser.parse_args()
    gaps, plain, seconds = [], [], []
    for seed in range(arguments.instances):
        model = synthetic(seed)
        limit = _memory(model, seed) if seed % 3 == 0 else None
        try:
            best = exhaustive(model, len(model.tokens), COUNTS, limit).latency
        except DoesNotFitError as error:
            print(f"instance {seed}: {error}")
            continue
        start = time.perf_counter()
        gaps.append(search(model, model.tokens, COUNTS, limit).latency / best - 1)
        seconds.append(time.perf_counter() - start)
        plain.append(plain_equation_6(model, model.tokens, COUNTS, limit).latency / best - 1)
    print(f"{len(gaps)} instances of up to 8 tasks and stages, against the best of all partitions")
    for name, values in (("search", gaps), ("equation 6 alone", plain)):
        print(f"  {name}: median {statistics.median(values):.2%}, worst {max(values):.2%}")
    print(f"  search took {statistics.median(seconds):.3f} s in the median, {max(seconds):.3f} s at most")
    _grouping()
    for seed in range(3):
        model = synthetic(seed, tasks=64, stages=8)
        start = time.perf_counter()
        search(model, model.tokens, COUNTS)
        took = time.perf_counter() - start
        print(f"64 tasks on 8 stages, {model.exposed:.0%} communication: searched in {took:.2f} s")
    for seed in range(3):
        loads, mesh = backbone.random_loads(seed, 64), Mesh(pipeline=8)
        planner = Planner(PlanningContext(backbone.profile(), backbone.info(), mesh))
        start = time.perf_counter()
        planner.plan(loads)
        took = time.perf_counter() - start
        print(f"64 tasks on 8 stages, costs of a roofline, alternatives and all: planned in {took:.2f} s")
    return 0


def _grouping() -> None:
    """Equation 7's answer against every grouping of eight to ten hybrid tasks, for each number of buckets."""
    gaps = []
    for seed in range(12):
        r = random.Random(seed)
        values = [r.uniform(0.1, 1.0) for _ in range(r.choice([8, 9, 10]))]
        best: dict[int, float] = {}
        for grouping in every_grouping(len(values)):
            found, count = imbalance(values, grouping), len(grouping)
            best[count] = min(best.get(count, math.inf), found)
        for count, least in best.items():
            spread = math.sqrt(imbalance(values, balanced(values, count)) / count) - math.sqrt(least / count)
            gaps.append(spread * count / sum(values))
    print(
        f"grouping of 8 to 10 hybrid tasks, {len(gaps)} cases: spread of buckets above the least possible, share of "
        f"their mean: median {statistics.median(gaps):.2%}, worst {max(gaps):.2%}"
    )


def _memory(model: Synthetic, seed: int) -> list[float]:
    """A limit that forbids some layouts."""
    return [random.Random(seed).uniform(1.5, 6.0) * max(model.tokens)] * len(model.weights)


if __name__ == "__main__":
    sys.exit(main())
