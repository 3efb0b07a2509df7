"""From which size on it is better to interleave tasks than to batch them: throughput against tokens, on two stages.

python benchmarks/crossover.py --output benchmarks/results/crossover-cpu-2-cores.json   # and the curves as .svg

Four tasks alike, four micro-batches each; the tokens of a task in a micro-batch double from point to point. `spatial`
batches the tasks and pays a bubble in each step, `temporal` interleaves them and computes small batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import add_worker, measured, one_core_each
from script import add_output, command_line, measured_on, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

TASKS, MICRO_BATCHES, STEPS = 4, 4, 4
TOKENS = (4, 8, 16, 32, 64, 128, 256)
LONGEST = 32
"""Tokens of a sequence, at the most."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points", type=int, default=len(TOKENS), help="only the first so many")
    add_worker(parser)
    add_output(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, leave the JSON and the picture."""
    arguments = parse(argv)
    result = measured(arguments, 2, __file__, ("--device", "--rounds", "--points"), measure)
    if result is None:
        return 0
    publish(result, markdown(result), arguments.output)
    if arguments.output is not None:
        draw(result, arguments.output.with_suffix(".svg"))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All points; what the first process found, nothing elsewhere."""
    import torch
    from stand import profile_of, random_backbone, stand_on_stages, surroundings

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.fusion.mesh import Mesh
    from megatron_mux.fusion.planning_context import PlanningContext
    from megatron_mux.runtime import initialize

    one_core_each()
    parallel = initialize(device=arguments.device)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    path = random_backbone("mid", dtype, parallel.rank)
    backbone = Backbone.load(path, parallel, dtype)
    context = PlanningContext(
        profile_of(backbone), backbone.info, Mesh(pipeline=2), dtype.itemsize, rolling=STEPS
    )
    result: dict[str, Any] = {**surroundings(backbone, 1), "rounds": arguments.rounds, "points": []}
    parallel = initialize(pipeline_parallel=2, device=arguments.device)
    for tokens in TOKENS[: arguments.points]:
        specs, records = _tasks(tokens, context.info.shape.vocab)
        bench = stand_on_stages(path, parallel, context, specs, records)
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
    """Tasks alike, whose micro-batches have so many tokens."""
    import torch
    from stand import spec_of

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
    """Tokens from which on `temporal` is faster, between two points on a logarithmic scale; None: nowhere."""
    from math import exp, log

    points = result["points"]
    for before, after in zip(points, points[1:], strict=False):
        low, high = log(before["temporal_over_spatial"]), log(after["temporal_over_spatial"])
        if low < 0 <= high:
            share = -low / (high - low)
            return exp(log(before["tokens"]) + share * (log(after["tokens"]) - log(before["tokens"])))
    return None


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    how = (
        f"Two stages, a process and a core each; {TASKS} tasks of {MICRO_BATCHES} micro-batches; medians of "
        f"{result['rounds']} rounds of {STEPS} steps without a flush."
    )
    lines = [
        measured_on(result["backbone"], result["dtype"], result["hardware"], result["versions"]),
        how,
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
    told = "at no point of these" if where is None else f"from about {where:.0f} tokens on"
    return "\n".join([*lines, "", f"Interleaving is faster than batching {told}.", ""])


def draw(result: dict[str, Any], file: Path) -> None:
    """The curves, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture (pip install 'megatron-mux[bench]')", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    tokens = [point["tokens"] for point in result["points"]]
    for name, colour in (("spatial", "tab:blue"), ("temporal", "tab:orange")):
        axes.plot(tokens, [p["rate"][name] for p in result["points"]], "o-", color=colour, label=name)
        axes.plot(
            tokens,
            [p["predicted"][name] for p in result["points"]],
            ":",
            color=colour,
            label=f"{name}, predicted",
        )
    where = crossing(result)
    if where is not None:
        axes.axvline(where, color="grey", linewidth=0.8)
        axes.annotate(f"{where:.0f}", (where, 0), xytext=(3, 3), textcoords="offset points", color="grey")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"tokens of a task in a micro-batch ({TASKS} tasks, {MICRO_BATCHES} micro-batches)")
    axes.set_ylabel("tokens/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
