"""`auto` against serial, spatial and temporal on one stage or two, and predicted against measured seconds of a step.

python benchmarks/policies.py                       # SmolLM2-135M, ten sets of 1 to 16 tasks: ten minutes
python benchmarks/policies.py --stages 2            # a random Llama on a pipeline, a process and a core to a stage
python benchmarks/policies.py --link 1000           # as root: two tensor ranks, over a link of so many Mbit/s
python benchmarks/policies.py --link 500 --experts  # as root: two pipelines that share experts, over such a link
python benchmarks/policies.py --output result.json  # the JSON, and the tables as result.md

The task sets are made of random sequences and adapters of mixed kinds; none of them is what the profile was measured
on. In each round every policy takes one step of every task, on a pipeline several without a flush, in turns; a plan
that is the same as another's is measured once, and a policy that is far from the fastest in one round only. "serial" is
one task at a time, summed. Over a link, "off", "kahn" and "halves" are the planner's plans with that
`--mux-interleave`; the plain policies hide no messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from namespaces import NamespacesRefused, limit_bandwidth, measure_in_namespaces
from processes import add_worker_flag, pin_to_core, run_in_processes
from script import (
    QUICKSTART,
    add_machine,
    add_output,
    command_line,
    environment,
    measured_on,
    publish,
    table,
)

from megatron_mux.fusion.graphs.launch_order import Interleave
from megatron_mux.gpus import set_allocator_options

# Tasks, shortest and longest max_length, tokens of a step, all of them together.
SETS = (
    (1, 64, 64, 300),
    (1, 512, 512, 700),
    (2, 16, 16, 60),
    (2, 64, 512, 900),
    (3, 16, 64, 200),
    (4, 64, 256, 800),
    (6, 16, 32, 150),
    (8, 16, 512, 1000),
    (12, 32, 128, 900),
    (16, 16, 256, 1200),
)
LIMIT = 1.03
"""How much slower than the best of the plain policies `auto` may be."""


STEPS_ON_A_PIPELINE = 3
"""Without a flush, in each turn."""

HIDING: tuple[Interleave, ...] = ("off", "kahn", "halves")
"""What `--mux-interleave` may be, besides `auto`."""

FAR = 1.3
"""A policy whose warm-up took so many times the fastest one's is measured in one round only."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--backbone", type=Path, help="default: the quickstart's; on two stages a random one")
    parser.add_argument("--shape", help="a random backbone of this shape in the workload")
    add_machine(parser)
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--link", type=float, metavar="MBIT", help="two tensor ranks, joined by a link of so many Mbit/s"
    )
    parser.add_argument(
        "--experts", action="store_true", help="over the link: a random Mixtral on two expert ranks"
    )
    parser.add_argument("--rounds", type=int, help="default: 5; on two ranks 3")
    parser.add_argument("--sets", type=int, default=len(SETS), help="only the first so many")
    add_worker_flag(parser)
    add_output(parser)
    arguments = parser.parse_args(argv)
    if arguments.link is not None and arguments.stages > 1:
        parser.error("--link: joins two ranks of one stage: leave --stages out")
    if arguments.experts and arguments.link is None:
        parser.error("--experts: exchanges rows over a link: add --link MBIT")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, leave the JSON."""
    arguments = parse(argv)
    set_allocator_options()  # before torch is imported, as `pretrain_mux.py` does
    flags = ("--stages", "--link", "--experts", "--rounds", "--sets", "--device", "--backbone", "--shape")
    result: dict[str, Any] | None
    if arguments.link is not None and arguments.worker is None:
        try:
            result = measure_in_namespaces(arguments, __file__, flags)
        except NamespacesRefused as error:
            print(f"network namespaces need root and iproute2: {error}", file=sys.stderr)
            return 2
    elif arguments.stages > 1 or arguments.worker is not None:
        result = run_in_processes(arguments, 2, __file__, flags, measure)
    else:
        result = measure(arguments)
    if result is not None:
        publish(result, markdown(result), arguments.output)
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All sets; what the first process found, nothing elsewhere."""
    import torch
    from engine_bench import load_or_measure_profile

    from megatron_mux.backbone.model import Backbone
    from megatron_mux.fusion.mesh import Mesh
    from megatron_mux.fusion.planner.planning_context import PlanningContext
    from megatron_mux.runtime import initialize

    pipeline, two = arguments.stages > 1, arguments.stages > 1 or arguments.link is not None
    mesh = Mesh(pipeline=arguments.stages)
    if arguments.link is not None:
        mesh = Mesh(data=2, expert=2, expert_tensor=1) if arguments.experts else Mesh(tensor=2)
    if two:
        pin_to_core()
    else:
        torch.set_num_threads(arguments.threads)
    rounds = arguments.rounds or (3 if two else 5)
    threads = torch.get_num_threads()
    parallel = initialize(mesh.tensor, expert_parallel=mesh.expert, device=arguments.device)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    path = _backbone(arguments, dtype, parallel.rank)
    backbone = Backbone.load(path, parallel, dtype)
    if arguments.link is not None:
        limit_bandwidth(1e6 * arguments.link)
    profile = load_or_measure_profile(backbone, remeasure=True)
    result: dict[str, Any] = environment(path.name, str(dtype), threads, arguments.device)
    result |= {"rounds": rounds, "costs": profile.description, "stages": arguments.stages, "sets": []}
    result |= {"link": arguments.link, "experts": arguments.experts}
    rolling = STEPS_ON_A_PIPELINE if pipeline else 1
    context = PlanningContext(
        profile,
        backbone.info,
        mesh,
        dtype.itemsize,
        rolling=rolling,
        interleave="auto" if arguments.link is not None else "off",
    )
    parallel = initialize(mesh.tensor, arguments.stages, expert_parallel=mesh.expert, device=arguments.device)
    for seed, chosen in enumerate(SETS[: arguments.sets]):
        found = _one_set(path, parallel, context, seed, chosen, rounds)
        result["sets"].append(found)
        if parallel.rank == 0:
            print(json.dumps(found), file=sys.stderr, flush=True)
    return result if parallel.rank == 0 else {}


def _backbone(arguments: argparse.Namespace, dtype: Any, rank: int) -> Path:
    """The directory of the backbone that the flags ask for: a given one, a random one, or the quickstart's."""
    from engine_bench import random_backbone

    if arguments.backbone is not None:
        return Path(arguments.backbone)
    shape = arguments.shape or ("mid" if arguments.stages > 1 else "moe" if arguments.experts else "wide")
    random = arguments.stages > 1 or arguments.link is not None or arguments.shape
    return random_backbone(shape, dtype, rank) if random else QUICKSTART / "backbone"


def _one_set(
    path: Path,
    parallel: Any,
    context: Any,
    seed: int,
    chosen: tuple[int, int, int, int],
    rounds: int,
) -> dict[str, Any]:
    from engine_bench import make_bench, random_tasks

    specs, records = random_tasks(*chosen, vocab=context.info.shape.vocab, seed=seed + 1)
    bench = make_bench(path, parallel, context, specs, records)
    steps = context.rolling
    try:
        plans, predicted = _plans(bench)
        auto = plans["auto"][0]
        # A plan that is the same as another's is measured once, and both have its seconds.
        first: dict[str, str] = {}
        for name, made in plans.items():
            layout = [_layout(plan) for plan in made]
            first[name] = next(n for n in plans if [_layout(plan) for plan in plans[n]] == layout)
        same = [name for name in plans if name != "auto" and first[name] == first["auto"]]
        plans = {name: made for name, made in plans.items() if first[name] == name}
        warm = {name: bench.seconds(made) for name, made in plans.items()}
        near = [name for name in plans if warm[name] <= FAR * min(warm.values())]
        taken: dict[str, list[float]] = {name: [] for name in plans}
        for turn in range(rounds):
            names = near if turn else list(plans)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                taken[name].append(bench.seconds(plans[name], steps))
    finally:
        bench.close()
    measured = {name: statistics.median(taken[alike]) for name, alike in first.items()}
    best = min((name for name in first if name != "auto"), key=lambda name: measured[name])
    # Rounds are compared with each other: what the machine does meanwhile hits both.
    ratio = statistics.median(a / b for a, b in zip(taken[first["auto"]], taken[first[best]], strict=False))
    return {
        "tasks": len(specs),
        "max_lengths": [spec.data.max_length for spec in specs],
        "tokens": sum(load.total for load in bench.loads.values()),
        "plan": [[list(h.tasks) for h in bucket.hybrid_tasks] for bucket in auto.buckets],
        "micro_batches": [bucket.micro_batches for bucket in auto.buckets],
        "same_as": same,
        "measured": measured,
        "halves": [bucket.halves for bucket in auto.buckets],
        "predicted": predicted,
        "best": best,
        "auto_against_best": ratio,
    }


def _plans(bench: Any) -> tuple[dict[str, list[Any]], dict[str, float | None]]:
    """The plans of each policy, which together step every task, and their predicted seconds."""
    planner, loads = bench.planner, bench.loads
    plans = {
        "serial": bench.alone(),
        "spatial": [planner.fixed("spatial", loads)],
        "temporal": [planner.fixed("temporal", loads)],
    }
    for hiding in HIDING if planner.context.hides_messages else ():
        plans[hiding] = [type(planner)(replace(planner.context, interleave=hiding)).plan(loads)]
    plans["auto"] = [planner.plan(loads)]
    by_the_planner = {name: plans[name][0].predicted_latency_s for name in (*HIDING, "auto") if name in plans}
    return plans, {**planner.compare(loads).alternatives, **by_the_planner}


def _layout(plan: Any) -> list[Any]:
    """What a plan computes, whatever it was predicted to take."""
    return [(b.hybrid_tasks, b.micro_batches, b.chunk, b.halves, b.launch) for b in plan.buckets]


def errors(result: dict[str, Any]) -> dict[str, list[float]]:
    """Relative error of every prediction, by policy."""
    found: dict[str, list[float]] = {}
    everything: list[float] = []
    for one in result["sets"]:
        counted: set[float] = set()
        for name, seconds in one["measured"].items():
            error = one["predicted"][name] / seconds - 1
            found.setdefault(name, []).append(error)
            if seconds not in counted:  # equal plans were measured once
                everything.append(error)
            counted.add(seconds)
    found["all"] = everything
    return found


def markdown(result: dict[str, Any]) -> str:
    """The tables."""
    where = "one stage" if result["stages"] == 1 else f"{result['stages']} stages, a process and a core each"
    if result["link"] is not None:
        ranks = "pipelines that share experts" if result["experts"] else "tensor ranks"
        where = f"two {ranks}, a core each, over a link of {result['link']:.0f} Mbit/s"
    policies = [name for name in result["sets"][0]["measured"] if name != "auto"]
    rounds = f"{result['rounds']} rounds in turns (policies far behind: one round)"
    lines = [
        measured_on(result),
        f"On {where}. Medians of {rounds}; predictions by the {result['costs']}.",
        "",
    ]
    rows: list[Sequence[object]] = []
    for one in result["sets"]:
        lengths = sorted(one["max_lengths"])
        span = str(lengths[0]) if lengths[0] == lengths[-1] else f"{lengths[0]}-{lengths[-1]}"
        same = f"as {one['same_as'][0]}" if one["same_as"] else str(len(one["plan"]))
        seconds = [f"{one['measured'][name]:.3f}" for name in (*policies, "auto")]
        rows.append((one["tasks"], span, one["tokens"], *seconds, same, f"{one['auto_against_best']:.3f}"))
    lines += table(
        f"tasks | max_length | tokens | {' s | '.join(policies)} s | auto s | auto's buckets | auto / best",
        rows,
    )
    worst = max(one["auto_against_best"] for one in result["sets"])
    lines += ["", f"Worst auto / best: **{worst:.3f}** (limit {LIMIT}).", "", *_errors(result)]
    if off := [abs(_apart(one)) for one in result["sets"] if not one["same_as"]]:
        said = f"{statistics.median(off):.1%} in the median, {max(off):.1%} at worst"
        lines += ["", f"Predictions of `auto` and of the best plain policy err differently by {said}."]
    return "\n".join(lines)


def _errors(result: dict[str, Any]) -> list[str]:
    """A row for each policy."""
    rows: list[Sequence[object]] = []
    for name, own in errors(result).items():
        off = [abs(error) for error in own]
        label = "different plans" if name == "all" else name
        middle, median = 1 + statistics.median(own), statistics.median(off)
        rows.append((label, f"{middle:.3f}", f"{median:.1%}", f"{max(off):.1%}"))
    return table("policy | predicted / measured: median | median error | worst error", rows)


def _apart(one: dict[str, Any]) -> float:
    """How differently predictions of a set's `auto` and its best plain policy err."""
    auto, best = (one["predicted"][name] / one["measured"][name] for name in ("auto", one["best"]))
    return float(auto / best - 1)


if __name__ == "__main__":
    sys.exit(main())
