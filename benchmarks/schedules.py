"""The structured template on the simulator: bubbles with and without the paper's assumptions, and other orders.

python benchmarks/schedules.py                                           # 500 random bucket sets: half a minute
python benchmarks/schedules.py --output benchmarks/results/schedules.json  # the JSON, and the tables as schedules.md

Costs are random and nothing is measured: the result is the same on every machine. MuxTune assumes (section 3.4.1,
appendix A) that F = B, that stages are equal, that transfers take no time and that memory is unlimited. Each row after
the first drops one of these assumptions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from bucket_sets import (
    ASSUMPTIONS,
    BucketSet,
    descending_order,
    latency_bound,
    longest_in_the_middle,
    random_set,
    random_variation,
    split_stages,
)

from megatron_mux.pipeline.bucket import sizes_of
from megatron_mux.pipeline.simulate import Simulation, simulate
from megatron_mux.pipeline.structured import StructuredRun, structured
from megatron_mux.pipeline.template import interleaved, one_f_one_b, with_updates
from tests.unit.pipeline.idle import bubble_shares, busy_seconds, internal_bubble

ROUNDING = 1e-9
"""Largest difference that rounding makes between two sums of the same seconds."""
SPREADS = (0.1, 0.2)
"""Standard deviations of the time of a pass, relative to the predicted time."""
COMPARED = ("the paper's", "memory limited")
"""Assumptions under which orders are compared."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--sets", type=int, default=500)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and publish."""
    arguments = parse(argv)
    result = {
        "sets": arguments.sets,
        "assumptions": {name: bubbles(name, arguments.sets) for name in ASSUMPTIONS},
        "varied": {str(deviation): varied(deviation, arguments.sets) for deviation in SPREADS},
        "orders": {name: slowdowns(name, arguments.sets) for name in COMPARED},
    }
    publish(result, markdown(result), arguments.output)
    return 0


# -- with and without the assumptions


def bubbles(assumptions: str, count: int) -> dict[str, Any]:
    """Measure the bubbles of the structured template, and the bubbles that no order can avoid."""
    inside, idle, least, over = [], [], [], []
    for seed in range(count):
        case = random_set(seed, ASSUMPTIONS[assumptions])
        found, bound = simulate_structured(case), latency_bound(case)
        inside.append(internal_bubble(found, case.stages - 1) / found.latency)
        idle += bubble_shares(found)
        least += [1 - seconds / bound for seconds in busy_seconds(found)]
        over.append(found.latency / bound)
    return {
        "sets_with_an_internal_bubble_on_the_last_stage": sum(b > ROUNDING for b in inside) / count,
        "internal_bubble_of_the_last_stage": spread(inside),
        "bubble_of_a_stage": spread(idle),
        "least_bubble_of_a_stage": spread(least),
        "latency_over_bound": spread(over),
    }


def simulate_structured(case: BucketSet) -> Simulation:
    """Simulate the structured template of a bucket set, all steps."""
    buckets = descending_order(case.buckets)
    sizes = sizes_of(buckets) * case.steps
    passes = structured(buckets, case.memory_limit, sizes)
    return simulate(with_updates(passes, sizes, len(buckets)), buckets, sizes=sizes)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 95th percentile and the maximum."""
    ordered = sorted(values)
    most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": statistics.median(ordered), "95%": most, "max": ordered[-1]}


# -- passes that take longer or shorter than predicted


def varied(deviation: float, count: int) -> dict[str, Any]:
    """Latency of three rolling steps when pass times vary, over that of the same template without variation."""
    found: dict[str, list[float]] = {"structured": [], "1F1B": []}
    for seed in range(count):
        case = random_set(seed, ASSUMPTIONS["three steps rolled"])
        buckets = descending_order(case.buckets)
        sizes = sizes_of(buckets) * case.steps
        for name, passes in (
            ("structured", structured(buckets, None, sizes)),
            ("1F1B", one_f_one_b(case.stages, sizes, len(buckets))),
        ):
            template = with_updates(passes, sizes, len(buckets))
            usual = simulate(template, buckets, sizes=sizes)
            really = simulate(template, buckets, sizes=sizes, vary=random_variation(deviation, seed))
            found[name].append(really.latency / usual.latency)
    return {name: spread(ratios) for name, ratios in found.items()}


# -- other orders


def eager(order: Callable[[list[Any]], list[Any]]) -> Callable[[BucketSet], float | None]:
    """The structured template with buckets in another order."""
    return lambda case: StructuredRun(order(case.buckets), case.memory_limit).latency


def not_eager(order: Callable[[list[Any]], list[Any]]) -> Callable[[BucketSet], float | None]:
    """1F1B: a stage runs at most one forward pass ahead for each later stage."""

    def latency(case: BucketSet) -> float:
        buckets = order(case.buckets)
        return simulate(one_f_one_b(case.stages, sizes_of(buckets)), buckets).latency

    return latency


def two_virtual_stages(case: BucketSet) -> float | None:
    """Interleaved 1F1B, two virtual stages per rank; None where micro-batches are not a multiple of the ranks."""
    buckets = split_stages(descending_order(case.buckets))
    sizes = sizes_of(buckets)
    if case.memory_limit is not None or sum(map(len, sizes)) % case.stages:
        return None
    return simulate(interleaved(case.stages, 2, sizes), buckets).latency


def eager_virtual_stages(case: BucketSet) -> float | None:
    """The structured template, two virtual stages per rank; None where interleaved 1F1B does not apply."""
    if two_virtual_stages(case) is None:
        return None
    return StructuredRun(split_stages(descending_order(case.buckets)), virtual=2).latency


def each_alone(case: BucketSet) -> float:
    """Each bucket's step alone, with a flush after it."""
    return sum(StructuredRun([bucket], case.memory_limit).latency for bucket in case.buckets)


ORDERS: dict[str, Callable[[BucketSet], float | None]] = {
    "ascending, eager": eager(lambda buckets: descending_order(buckets)[::-1]),
    "unsorted, eager": eager(list),
    "longest in the middle, eager": eager(longest_in_the_middle),
    "descending, not eager (1F1B)": not_eager(descending_order),
    "unsorted, not eager": not_eager(list),
    "longest in the middle, not eager": not_eager(longest_in_the_middle),
    "descending, eager, two virtual stages": eager_virtual_stages,
    "descending, interleaved 1F1B, two virtual stages": two_virtual_stages,
    "each bucket by itself": each_alone,
}


def slowdowns(assumptions: str, count: int) -> dict[str, Any]:
    """Compare each order's latency with that of the structured template."""
    ratios: dict[str, list[float]] = {name: [] for name in ORDERS}
    for seed in range(count):
        case = random_set(seed, ASSUMPTIONS[assumptions])
        best = StructuredRun(descending_order(case.buckets), case.memory_limit).latency
        for name, order in ORDERS.items():
            latency = order(case)
            if latency is not None:
                ratios[name].append(latency / best)
    return {
        name: {
            "sets": len(own),
            "mean": statistics.mean(own),
            "median": statistics.median(own),
            "slower": sum(ratio > 1 + ROUNDING for ratio in own) / len(own),
            "faster": sum(ratio < 1 - ROUNDING for ratio in own) / len(own),
        }
        for name, own in ratios.items()
        if own
    }


# -- tables


def markdown(result: Mapping[str, Any]) -> str:
    """Render the tables."""
    rows: list[Sequence[object]] = []
    for name, found in result["assumptions"].items():
        rows.append(
            (
                name,
                f"{found['sets_with_an_internal_bubble_on_the_last_stage']:.1%}",
                _three(found["internal_bubble_of_the_last_stage"], ".1%"),
                _three(found["bubble_of_a_stage"], ".1%"),
                _three(found["least_bubble_of_a_stage"], ".1%"),
                _three(found["latency_over_bound"], ".3f"),
            )
        )
    summary = (
        f"{result['sets']} random bucket sets, simulated; nothing is measured. Triples are median / 95th percentile / "
        "maximum; bubbles are shares of the latency. The bound is a lower bound on the latency of any order."
    )
    lines = [
        summary,
        "",
        *table(
            "assumptions | sets with an internal bubble on the last stage | that bubble | bubble of a stage | "
            "lower bound on the bubble | latency / bound",
            rows,
        ),
    ]
    lines += [
        "",
        "Three steps rolled, passes that take longer or shorter than predicted: latency over that without variation.",
        "",
        *table(
            "standard deviation | structured | 1F1B",
            [
                (deviation, *(_three(own, ".3f") for own in found.values()))
                for deviation, found in result["varied"].items()
            ],
        ),
    ]
    for assumptions, found in result["orders"].items():
        compared = [
            (name, *(f"{own[key]:.3f}" for key in ("mean", "median")), f"{own['slower']:.0%}")
            + (f"{own['faster']:.0%}", own["sets"])
            for name, own in found.items()
        ]
        lines += [
            "",
            f"Latency over that of the structured template (descending, eager), assumptions: {assumptions}.",
            "",
        ]
        lines += table("order | mean | median | slower in | faster in | sets", compared)
    return "\n".join(lines)


def _three(found: Mapping[str, float], form: str) -> str:
    return " / ".join(format(value, form) for value in found.values())


if __name__ == "__main__":
    sys.exit(main())
