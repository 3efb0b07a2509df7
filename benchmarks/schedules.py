"""The structured template on the simulator: bubbles with and without the paper's context, and other orders.

python benchmarks/schedules.py                                           # 500 random bucket sets: half a minute
python benchmarks/schedules.py --output benchmarks/results/schedules.json  # the JSON, and the tables as schedules.md

Seconds are made up and nothing is measured: what comes out is the same on every machine. MuxTune's context (section
3.4.1, appendix A): F = B, equal stages, no transfer time, memory to spare. Each line after the first gives up one.
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
    PREMISES,
    BucketSet,
    halved_stages,
    least_latency,
    longest_in_the_middle,
    random_set,
    sorted_down,
    varying,
)

from megatron_mux.pipeline.bucket import sizes_of
from megatron_mux.pipeline.rolling import with_updates
from megatron_mux.pipeline.simulate import Simulation, simulate
from megatron_mux.pipeline.structured import schedule, structured
from megatron_mux.pipeline.template import interleaved, one_f_one_b

ROUNDING = 1e-9
"""What two sums of the same seconds may differ by."""
SPREADS = (0.1, 0.2)
"""Deviations of what passes really take from what they are predicted to take."""
COMPARED = ("the paper's", "memory limited")
"""PlanningContext under which orders are compared."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--sets", type=int, default=500)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, print, leave the JSON."""
    arguments = parse(argv)
    result = {
        "sets": arguments.sets,
        "context": {name: bubbles(name, arguments.sets) for name in PREMISES},
        "varied": {str(deviation): varied(deviation, arguments.sets) for deviation in SPREADS},
        "orders": {name: slowdowns(name, arguments.sets) for name in COMPARED},
    }
    publish(result, markdown(result), arguments.output)
    return 0


# -- with and without the context


def bubbles(premise: str, count: int) -> dict[str, Any]:
    """What the structured template leaves idle, and what no order could have kept busy."""
    inside, idle, least, over = [], [], [], []
    for seed in range(count):
        case = random_set(seed, PREMISES[premise])
        found, bound = run(case), least_latency(case)
        inside.append(found.internal_bubble(case.stages - 1) / found.latency)
        idle += [found.bubble(stage) for stage in range(case.stages)]
        least += [1 - found.busy(stage) / bound for stage in range(case.stages)]
        over.append(found.latency / bound)
    return {
        "sets_with_an_internal_bubble_on_the_last_stage": sum(b > ROUNDING for b in inside) / count,
        "internal_bubble_of_the_last_stage": spread(inside),
        "bubble_of_a_stage": spread(idle),
        "least_bubble_of_a_stage": spread(least),
        "latency_over_bound": spread(over),
    }


def run(case: BucketSet) -> Simulation:
    """The structured template of a set, all its steps."""
    buckets = sorted_down(case.buckets)
    sizes = sizes_of(buckets) * case.steps
    passes = structured(buckets, case.memory_limit, sizes)
    return simulate(with_updates(passes, sizes, len(buckets)), buckets, sizes=sizes)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and largest."""
    ordered = sorted(values)
    most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": statistics.median(ordered), "95%": most, "max": ordered[-1]}


# -- passes that do not take what they should


def varied(deviation: float, count: int) -> dict[str, Any]:
    """What passes that vary cost three rolling steps: latency over that of the same template without variation."""
    found: dict[str, list[float]] = {"structured": [], "1F1B": []}
    for seed in range(count):
        case = random_set(seed, PREMISES["three steps rolled"])
        buckets = sorted_down(case.buckets)
        sizes = sizes_of(buckets) * case.steps
        for name, passes in (
            ("structured", structured(buckets, None, sizes)),
            ("1F1B", one_f_one_b(case.stages, sizes, len(buckets))),
        ):
            template = with_updates(passes, sizes, len(buckets))
            usual = simulate(template, buckets, sizes=sizes)
            really = simulate(template, buckets, sizes=sizes, vary=varying(deviation, seed))
            found[name].append(really.latency / usual.latency)
    return {name: spread(ratios) for name, ratios in found.items()}


# -- other orders


def eager(order: Callable[[list[Any]], list[Any]]) -> Callable[[BucketSet], float | None]:
    """Buckets enter in another order; all else is as in the structured template."""
    return lambda case: schedule(order(case.buckets), case.memory_limit)[1]


def not_eager(order: Callable[[list[Any]], list[Any]]) -> Callable[[BucketSet], float | None]:
    """1F1B: a stage launches no more forward passes ahead than there are stages behind it."""

    def latency(case: BucketSet) -> float:
        buckets = order(case.buckets)
        return simulate(one_f_one_b(case.stages, sizes_of(buckets)), buckets).latency

    return latency


def two_virtual_stages(case: BucketSet) -> float | None:
    """Interleaved 1F1B, two virtual stages to a rank; None: the ranks do not divide the micro-batches."""
    buckets = halved_stages(sorted_down(case.buckets))
    sizes = sizes_of(buckets)
    if case.memory_limit is not None or sum(map(len, sizes)) % case.stages:
        return None
    return simulate(interleaved(case.stages, 2, sizes), buckets).latency


def eager_virtual_stages(case: BucketSet) -> float | None:
    """The structured template with two virtual stages to a rank, on the sets that interleaved 1F1B has an order for."""
    if two_virtual_stages(case) is None:
        return None
    return schedule(halved_stages(sorted_down(case.buckets)), virtual=2)[1]


def each_alone(case: BucketSet) -> float:
    """Each bucket's step by itself, with a flush after it."""
    return sum(schedule([bucket], case.memory_limit)[1] for bucket in case.buckets)


ORDERS: dict[str, Callable[[BucketSet], float | None]] = {
    "ascending, eager": eager(lambda buckets: sorted_down(buckets)[::-1]),
    "unsorted, eager": eager(list),
    "longest in the middle, eager": eager(longest_in_the_middle),
    "descending, not eager (1F1B)": not_eager(sorted_down),
    "unsorted, not eager": not_eager(list),
    "longest in the middle, not eager": not_eager(longest_in_the_middle),
    "descending, eager, two virtual stages": eager_virtual_stages,
    "descending, interleaved 1F1B, two virtual stages": two_virtual_stages,
    "each bucket by itself": each_alone,
}


def slowdowns(premise: str, count: int) -> dict[str, Any]:
    """Latency of each order over that of the structured template."""
    ratios: dict[str, list[float]] = {name: [] for name in ORDERS}
    for seed in range(count):
        case = random_set(seed, PREMISES[premise])
        best = schedule(sorted_down(case.buckets), case.memory_limit)[1]
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


# -- for people


def markdown(result: Mapping[str, Any]) -> str:
    """The tables."""
    rows: list[Sequence[object]] = []
    for name, found in result["context"].items():
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
    said = (
        f"{result['sets']} random bucket sets, simulated; nothing is measured. Triples are median / 95% / largest; "
        "bubbles are shares of the latency. The bound is what no order of the passes can beat."
    )
    lines = [
        said,
        "",
        *table(
            "context | sets with an internal bubble on the last stage | that bubble | bubble of a stage | "
            "the least by the bound | latency / bound",
            rows,
        ),
    ]
    lines += [
        "",
        "Three steps rolled, passes that take longer or shorter than predicted: latency over that without variation.",
        "",
        *table(
            "deviation | structured | 1F1B",
            [
                (deviation, *(_three(own, ".3f") for own in found.values()))
                for deviation, found in result["varied"].items()
            ],
        ),
    ]
    for premise, found in result["orders"].items():
        compared = [
            (name, *(f"{own[key]:.3f}" for key in ("mean", "median")), f"{own['slower']:.0%}")
            + (f"{own['faster']:.0%}", own["sets"])
            for name, own in found.items()
        ]
        lines += [
            "",
            f"Latency over that of the structured template (descending, eager), context: {premise}.",
            "",
        ]
        lines += table("order | mean | median | slower in | faster in | sets", compared)
    return "\n".join(lines)


def _three(found: Mapping[str, float], form: str) -> str:
    return " / ".join(format(value, form) for value in found.values())


if __name__ == "__main__":
    sys.exit(main())
