"""Micro-batch size from which interleaving tasks is faster than batching them, on two stages.

python benchmarks/crossover.py --output benchmarks/results/crossover-cpu-2-cores.json   # and the curves as .svg

Four identical tasks with four micro-batches each; the tokens of a task in a micro-batch double from point to point.
`spatial` batches the tasks and has a bubble in each step; `temporal` interleaves them and computes small batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot
from processes import add_worker_flag, pin_to_core, run_in_processes
from script import add_output, command_line, measured_on, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

TASKS, MICRO_BATCHES, STEPS = 4, 4, 4
TOKENS = (4, 8, 16, 32, 64, 128, 256)
LONGEST = 32
"""Longest sequence, in tokens."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points", type=int, default=len(TOKENS), help="measure only the first N points")
    add_worker_flag(parser)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and publish the table and the plot."""
    arguments = parse(argv)
    result = run_in_processes(arguments, 2, __file__, ("--device", "--rounds", "--points"), measure)
    if result is None:
        return 0
    publish(result, markdown(result), arguments.output)
    if arguments.output is not None:
        draw(result, arguments.output.with_suffix(".svg"))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all points; returns the result on rank 0 and {} on the other rank."""
    import torch
    from engine_bench import environment, load_or_measure_profile, make_bench_on_stages, random_backbone

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.fusion.mesh import Mesh
    from megatron_mux.fusion.planner.planning_context import PlanningContext
    from megatron_mux.runtime import initialize

    pin_to_core()
    parallel = initialize(device=arguments.device)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    path = random_backbone("mid", dtype, parallel.rank)
    backbone = Backbone.load(path, parallel, dtype)
    context = PlanningContext(
        load_or_measure_profile(backbone), backbone.info, Mesh(pipeline=2), dtype.itemsize, rolling=STEPS
    )
    result: dict[str, Any] = {**environment(backbone, 1), "rounds": arguments.rounds, "points": []}
    parallel = initialize(pipeline_parallel=2, device=arguments.device)
    for tokens in TOKENS[: arguments.points]:
        specs, records = _tasks(tokens, context.info.shape.vocab)
        bench = make_bench_on_stages(path, parallel, context, specs, records)
        plans = {
            "spatial": [bench.planner.fixed("spatial", bench.loads)],
            "temporal": [bench.planner.fixed("temporal", bench.loads)],
        }
        for plan in plans.values():  # warm up
            bench.seconds(plan)
        taken: dict[str, list[float]] = {name: [] for name in plans}
        for turn in range(arguments.rounds):
            for name in list(plans)[:: 1 if turn % 2 else -1]:
                taken[name].append(bench.seconds(plans[name], STEPS))
        bench.close()
        whole = tokens * TASKS * MICRO_BATCHES
        rate = {name: whole / statistics.median(own) for name, own in taken.items()}
        predicted = {name: whole / (plan[0].predicted_latency_s or 1.0) for name, plan in plans.items()}
        ratio = statistics.median(s / t for s, t in zip(taken["spatial"], taken["temporal"], strict=True))
        result["points"].append(
            {"tokens": tokens, "rate": rate, "predicted": predicted, "temporal_over_spatial": ratio}
        )
        if parallel.rank == 0:
            print(json.dumps(result["points"][-1]), file=sys.stderr, flush=True)
    return result if parallel.rank == 0 else {}


def _tasks(tokens: int, vocab: int) -> tuple[list[Any], list[Any]]:
    """Make identical tasks with `tokens` tokens in a micro-batch, and their records."""
    import torch
    from engine_bench import spec_of

    from tests.reference.records import Records

    length = min(tokens, LONGEST)
    batch = tokens // length
    specs, records = [], []
    for i in range(TASKS):
        adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
        specs.append(spec_of(f"task-{i}", adapter, batch, length, MICRO_BATCHES))
        generator = torch.Generator().manual_seed(i)
        drawn = [
            torch.randint(3, vocab, (length,), generator=generator) for _ in range(batch * MICRO_BATCHES)
        ]
        records.append(Records([(own, torch.arange(length) >= length // 2) for own in drawn]))
    return specs, records


def crossing(result: dict[str, Any]) -> float | None:
    """Tokens from which `temporal` is faster; None if it is not."""
    return plot.crossing([(point["tokens"], point["temporal_over_spatial"]) for point in result["points"]])


def markdown(result: dict[str, Any]) -> str:
    """Render the table."""
    setup = (
        f"Two stages, one process and core each; {TASKS} tasks of {MICRO_BATCHES} micro-batches; medians of "
        f"{result['rounds']} rounds of {STEPS} steps without a flush."
    )
    lines = [
        measured_on(result["backbone"], result["dtype"], result["hardware"], result["versions"]),
        setup,
        "",
    ]
    rows = [
        (
            point["tokens"],
            *(f"{point['rate'][name]:.0f}" for name in ("spatial", "temporal")),
            f"{point['temporal_over_spatial']:.3f}",
            *(f"{point['predicted'][name]:.0f}" for name in ("spatial", "temporal")),
        )
        for point in result["points"]
    ]
    lines += table(
        "tokens of a task in a micro-batch | spatial tokens/s | temporal tokens/s | temporal / spatial | "
        "spatial predicted | temporal predicted",
        rows,
    )
    where = crossing(result)
    verdict = "at none of these points" if where is None else f"from about {where:.0f} tokens on"
    return "\n".join([*lines, "", f"Interleaving is faster than batching {verdict}.", ""])


def draw(result: dict[str, Any], file: Path) -> None:
    """Plot measured and predicted throughput."""
    curves = []
    for name, colour in (("spatial", "tab:blue"), ("temporal", "tab:orange")):
        for key, label, style in (("rate", name, "o-"), ("predicted", f"{name}, predicted", ":")):
            points = [(point["tokens"], point[key][name]) for point in result["points"]]
            curves.append(plot.Curve(label, points, colour, style))
    where = crossing(result)
    x_label = f"tokens of a task in a micro-batch ({TASKS} tasks, {MICRO_BATCHES} micro-batches)"
    plot.draw(file, curves, (x_label, "tokens/s"), () if where is None else (where,))


if __name__ == "__main__":
    sys.exit(main())
