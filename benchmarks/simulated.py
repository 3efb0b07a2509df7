"""Simulated against measured latency of templates, in processes that sleep for the duration of each pass.

torchrun --nproc-per-node 4 benchmarks/simulated.py                       # 20 random bucket sets: two minutes
torchrun --nproc-per-node 4 benchmarks/simulated.py --output result.json  # the JSON, and the table as result.md

Each process runs a stage and sends small tensors over gloo, so that the difference from the simulation is the overhead
of execution and other load of the machine. A sleep takes a little longer than requested, much longer on a busy machine:
the latency is simulated both with the requested and with the actual seconds. The error of a set is that of its median
turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--sets", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds that each set should take")
    parser.add_argument("--turns", type=int, default=3)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on all ranks, and publish on rank 0."""
    arguments = parse(argv)
    import torch

    from megatron_mux import runtime
    from tests.distributed.sleeping import random_pipeline, turn

    torch.set_num_threads(1)
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = runtime.initialize(1, stages, device="cpu")
    turn(random_pipeline(0, stages, 0.1), parallel)  # warm up: connect neighbours
    sets = []
    for seed in range(arguments.sets):
        pipeline = random_pipeline(seed, stages, arguments.seconds)
        passes = [
            bucket.seconds(action)
            for actions in pipeline.template
            for action in actions
            if action.is_pass and (bucket := pipeline.buckets[action.bucket % len(pipeline.buckets)])
        ]
        found: dict[str, Any] = {
            "template": pipeline.name,
            "buckets": len(pipeline.buckets),
            "steps": len(pipeline.sizes) // len(pipeline.buckets),
            "passes_of_a_stage": len(passes) // stages,
            "shortest_pass_s": min(passes),
            "longest_pass_s": max(passes),
            "turns": [asdict(turn(pipeline, parallel)) for _ in range(arguments.turns)],
        }
        sets.append(found)
    if parallel.rank == 0:
        result = {"stages": stages, "cores": len(os.sched_getaffinity(0)), "sets": sets}
        publish(result, markdown(result), arguments.output)
    runtime.shutdown()
    return 0


def markdown(result: Mapping[str, Any]) -> str:
    """Render the table."""
    rows = []
    middle: dict[str, list[float]] = {"asked": [], "slept": []}
    for one in result["sets"]:
        errors = {key: [turn["seconds"] / turn[key] - 1 for turn in one["turns"]] for key in middle}
        for key, own in errors.items():
            middle[key].append(statistics.median(own))
        span = f"{1e3 * one['shortest_pass_s']:.0f}-{1e3 * one['longest_pass_s']:.0f}"
        cells = [", ".join(f"{error:+.1%}" for error in own) for own in errors.values()]
        rows.append((one["template"], one["buckets"], one["steps"], one["passes_of_a_stage"], span, *cells))
    heading = (
        "template | buckets | steps | passes of a stage | ms of a pass | against requested | against actual"
    )
    requested, actual = (
        f"median **{statistics.median(own):+.1%}**, worst {max(own, key=abs):+.1%}" for own in middle.values()
    )
    summary = (
        f"{result['stages']} processes that sleep, on {result['cores']} cores: excess of the measured latency "
        "of each turn over the simulated one, with the requested and with the actual seconds of sleep."
    )
    lines = [
        summary,
        "",
        *table(heading, rows),
        "",
        f"Median turn of each set: against requested {requested}; against actual {actual}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
