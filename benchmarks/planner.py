"""The planner's search against an exhaustive search, plans under random limits of memory, and planning many tasks.

python benchmarks/planner.py --output benchmarks/results/planner.json      # a quarter of an hour on a core

Costs are random; latency is that of one of eight steps between two flushes. The exhaustive search tries all partitions
into hybrid tasks, groupings into buckets, entry orders and numbers of micro-batches, and prunes what cannot be more
than 0.1% faster. Limits are between what is always there and what one hybrid task of all would take; peaks are
those of a simulation of the plan's template with every chunk's own bytes.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.errors import UserError
from megatron_mux.fusion.device import cpu_name
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.balance import balanced_split
from megatron_mux.fusion.planner.cost import bucket_cost
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext
from megatron_mux.fusion.planner.search import search
from megatron_mux.pipeline.bucket import sizes_of
from megatron_mux.pipeline.structured import StructuredRun
from tests.unit.fusion import backbone
from tests.unit.fusion.planner.exhaustive import exhaustive, plain_equation_6
from tests.unit.fusion.planner.limits import MESHES, limited_planner, most_bytes
from tests.unit.fusion.planner.synthetic import Synthetic, synthetic

COUNTS = (1, 2, 4, 8)
TOLERANCE = 1e-3
MEDIAN_TARGET, WORST_TARGET = 0.01, 0.05
SEEDS = (5000, 6000, 7000)
"""Of the first of the instances; none is one that the planner's constants were chosen by."""
LARGE = {64: 0.7, 500: 5.0}
"""Numbers of tasks, and the seconds that planning them for eight stages may take."""
MEBIBYTES_TARGET = 300


def main() -> int:
    """Measure and publish; returns 1 if a target is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=200, help="number of small task sets (200)")
    parser.add_argument("--limits", type=int, default=1000, help="number of plans under a limit (1000)")
    add_output(parser)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": f"{cpu_name()}, one of {os.cpu_count()} cores"}
    # First, since the peak of memory is that of the process.
    result["large"] = [_large(seed, count) for count in LARGE for seed in range(3)]
    instances = [_instance(seed + i, seed) for seed in SEEDS for i in range(arguments.instances)]
    result["instances"] = [instance for instance in instances if instance is not None]
    result["do_not_fit"] = instances.count(None)
    result["limits"] = _limits(arguments.limits)
    publish(result, _markdown(result), arguments.output)
    met = all(
        one["cpu_s"] <= LARGE[one["tasks"]] and one["mib"] <= MEBIBYTES_TARGET for one in result["large"]
    )
    for seed in SEEDS:
        gaps = [instance["gap"] for instance in result["instances"] if instance["from"] == seed]
        met &= statistics.median(gaps) <= MEDIAN_TARGET and max(gaps) <= WORST_TARGET
    return 0 if met and not result["limits"]["exceeded"] and not result["limits"]["without"] else 1


def _instance(seed: int, first: int) -> dict[str, Any] | None:
    """Compare the searches on four to six tasks and two to four stages; None if the tasks do not fit.

    Every third instance has a memory limit.
    """
    r = random.Random(seed)
    model = synthetic(seed, tasks=r.choice([4, 5, 6]), stages=r.choice([2, 3, 4]))
    limit = [r.uniform(1.5, 6.0) * max(model.tokens)] * len(model.weights) if seed % 3 == 0 else None
    start = time.process_time()
    found = search(model, model.tokens, COUNTS, limit, steps=ROLLING_STEPS)
    if found is None:
        return None
    seconds = time.process_time() - start
    best = exhaustive(
        model, len(model.tokens), COUNTS, limit, ROLLING_STEPS, below=found.latency, tolerance=TOLERANCE
    )
    least = found.latency if best is None else best.latency
    surrogate = plain_equation_6(model, model.tokens, COUNTS, limit, ROLLING_STEPS)
    return {
        "seed": seed,
        "from": first,
        "tasks": len(model.tokens),
        "stages": len(model.weights),
        "limited": limit is not None,
        "gap": found.latency / least - 1,
        "equation_6_gap": surrogate.latency / least - 1,
        "prediction_error": None if limit is not None else found.latency / _simulated(model, found) - 1,
        "search_cpu_s": seconds,
    }


def _simulated(model: Synthetic, found: Any) -> float:
    """Simulate all steps between two flushes; returns the seconds of one step."""
    count = found.micro_batches
    buckets = [bucket_cost([model.hybrid(h, count) for h in hybrids]) for hybrids in found.buckets]
    return StructuredRun(buckets, None, sizes_of(buckets) * ROLLING_STEPS).latency / ROLLING_STEPS


def _limits(count: int) -> dict[str, int]:
    """Plan under random limits: how many plans, that exceed theirs, that have none, and tasks that do not fit."""
    found = {"plans": 0, "exceeded": 0, "without": 0, "refused": 0}
    seed = 0
    while found["plans"] < count:
        r = random.Random(seed)
        loads = backbone.random_loads(seed, r.randint(1, 5))
        mesh, share = r.choice(MESHES), r.uniform(0.0, 1.1)
        planner = limited_planner(loads, mesh, share)
        seed += 1
        try:
            plan = planner.plan(loads)
        except UserError:
            found["refused"] += 1
            continue
        assert planner.memory_limit is not None
        found["plans"] += 1
        found["without"] += len(plan.activation_limit) != plan.ranks
        found["exceeded"] += most_bytes(plan, planner.context.with_tasks(loads)) > planner.memory_limit * (
            1 + 1e-6
        )
    return found


def _large(seed: int, count: int) -> dict[str, float]:
    """Measure what `tools/plan.py` does for so many tasks and 8 stages: divide layers, plan, and compare."""
    tasks = backbone.random_loads(seed, count)
    context = PlanningContext(
        backbone.profile(),
        backbone.info(),
        Mesh(pipeline=8),
        rolling=ROLLING_STEPS,
        tasks=tasks,
        tables=backbone.MadeUpTables(),
    )
    gc.freeze()  # as the tool does
    before = _mebibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    wall, cpu = time.perf_counter(), time.process_time()
    planner = Planner(context.with_split(balanced_split(context)))
    planner.plan(tasks)
    planner.compare(tasks)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"seed": seed, "tasks": count, "cpu_s": cpu, "wall_s": wall, "mib": _mebibytes("VmHWM") - before}


def _mebibytes(name: str) -> float:
    """A figure of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def _markdown(result: dict[str, Any]) -> str:
    instances = result["instances"]
    rows = []
    for name, chosen in [
        *((f"{n} tasks", [i for i in instances if i["tasks"] == n]) for n in (4, 5, 6)),
        *((f"{n} stages", [i for i in instances if i["stages"] == n]) for n in (2, 3, 4)),
        *((f"from seed {seed}", [i for i in instances if i["from"] == seed]) for seed in SEEDS),
        ("all", instances),
    ]:
        if not chosen:
            continue
        gaps, surrogate = ([i[key] for i in chosen] for key in ("gap", "equation_6_gap"))
        rows.append(
            (
                name,
                len(chosen),
                f"{statistics.median(gaps):.2%}",
                f"{max(gaps):.2%}",
                f"{statistics.median(surrogate):.1%}",
                f"{max(surrogate):.1%}",
            )
        )
    errors = [abs(i["prediction_error"]) for i in instances if i["prediction_error"] is not None]
    seconds = [i["search_cpu_s"] for i in instances]
    headings = "instances | number | search: median gap | worst | equation 6 alone: median gap | worst"
    left_out = f"{result['do_not_fit']} more exceed their memory limit"
    limits = result["limits"]
    sentences = [
        f"Targets, of each seed: median gap at most {MEDIAN_TARGET:.0%}, worst at most {WORST_TARGET:.0%}.",
        f"The search took {statistics.median(seconds):.3f} s of CPU time in the median, {max(seconds):.3f} s at most.",
        f"The published latency differs by {statistics.mean(errors):.2%} in the mean, {max(errors):.1%} at most, from",
        f"a simulation of all {ROLLING_STEPS} steps.",
        f"Of {limits['plans']} plans under random limits of memory {limits['exceeded']} exceed theirs and",
        f"{limits['without']} have none; {limits['refused']} more task sets were refused.",
    ]
    for count, target in LARGE.items():
        of = [one for one in result["large"] if one["tasks"] == count]
        sentences += [
            f"{count} tasks on 8 stages, planned as `tools/plan.py` does, take",
            f"{', '.join(format(one['cpu_s'], '.2f') for one in of)} s of CPU time (target {target} s) and at most",
            f"{max(one['mib'] for one in of):.0f} MiB beyond what is imported.",
        ]
    return "\n".join(
        [
            f"{result['machine']}; {left_out}.",
            "",
            *table(headings, rows),
            "",
            *sentences,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
