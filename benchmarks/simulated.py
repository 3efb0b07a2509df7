"""Simulated against measured latency of templates on processes that sleep as long as a pass would take.

torchrun --nproc-per-node 4 benchmarks/simulated.py                       # 20 random bucket sets: two minutes
torchrun --nproc-per-node 4 benchmarks/simulated.py --output result.json  # the JSON, and the table as result.md

A stage on each process, small tensors over gloo: what differs from the simulation is what execution itself costs, and
what else the machine does. Sleeping takes a little longer than asked, much longer on a busy machine: the simulation is
made of both. All turns of a set are shown; its error is the least of them.
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
    parser.add_argument("--seconds", type=float, default=2.0, help="that each set should take")
    parser.add_argument("--turns", type=int, default=3)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on every rank; the first one prints."""
    arguments = parse(argv)
    import torch

    from megatron_mux import runtime
    from tests.distributed.sleeping import random_pipeline, turn

    torch.set_num_threads(1)
    stages = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = runtime.initialize(1, stages, device="cpu")
    turn(random_pipeline(0, stages, 0.1), parallel)  # neighbours meet
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
    """The table."""
    rows = []
    middle: dict[str, list[float]] = {"asked": [], "slept": []}
    for one in result["sets"]:
        errors = {key: [turn["seconds"] / turn[key] - 1 for turn in one["turns"]] for key in middle}
        for key, own in errors.items():
            middle[key].append(statistics.median(own))
        span = f"{1e3 * one['shortest_pass_s']:.0f}-{1e3 * one['longest_pass_s']:.0f}"
        said = [", ".join(f"{error:+.1%}" for error in own) for own in errors.values()]
        rows.append((one["template"], one["buckets"], one["steps"], one["passes_of_a_stage"], span, *said))
    heading = "template | buckets | steps | passes of a stage | ms of a pass | against asked | against slept"
    asked, slept = (
        f"median **{statistics.median(own):+.1%}**, worst {max(own, key=abs):+.1%}" for own in middle.values()
    )
    what = (
        f"{result['stages']} processes that sleep, on {result['cores']} cores: how much longer than simulated each "
        "turn takes, simulated on the seconds that passes are asked to sleep, and on those that they did sleep."
    )
    lines = [
        what,
        "",
        *table(heading, rows),
        "",
        f"Median turn of each set: against asked {asked}; against slept {slept}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
