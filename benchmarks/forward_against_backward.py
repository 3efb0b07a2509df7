"""What forward passes against backward passes would add to hidden messages of tensor ranks: simulated, not built.

python benchmarks/forward_against_backward.py --output benchmarks/results/forward-against-backward.json   # ten minutes

In the steady state of 1F1B a stage would compute the forward pass of one unit and the backward pass of an earlier one
in turns, by the launch order of `fusion/graphs/launch_order.py`; each result leaves when its own pass is done. Each
side has its fastest plan among those with the equal tasks in one or several buckets, these in one or several hybrid
tasks and in 1 to 32 micro-batches. Costs are rooflines: of an H100 over two links, and of a CPU core over links on
which messages are a third or a half of a task's step.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interleaving import LINKS, equal_tasks, h100, info_of, share_of_messages, with_messages
from script import add_output, command_line, publish, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

if TYPE_CHECKING:
    from megatron_mux.fusion.planner.cost import HybridCost
    from megatron_mux.fusion.planner.stage_cost import StageCosts

SHARES = {"CPU core, messages a third": 1 / 3, "CPU core, messages a half": 1 / 2}
CASES = [*product(LINKS, (128, 512)), *product(SHARES, (128,))]
"""Links, and tokens of a sequence."""
TENSOR, STAGES, TASKS, SEQUENCES = (2, 4, 8), (2, 4), (1, 2, 4, 8), 16
MICRO_BATCHES, MOST_UNITS = (1, 2, 4, 8, 16, 32), 32
"""Of a bucket's step, and of a whole one."""
EXISTING = ("off", "in turns", "halves")
"""The sides that exist; `auto` is the fastest of them."""
SIDES = {
    "pairs": "all tasks of a bucket in one batch, passes in pairs wherever two can be",
    "best of both": "pairs, also of halves and of hybrid tasks in turns, only where they are faster",
    "bound": "that, and passes outside pairs in halves where that is faster, whatever their unit's other passes are in",
}
"""The sides that would be built."""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and publish."""
    parser = command_line(__doc__)
    add_output(parser)
    arguments = parser.parse_args(argv)
    rows = [_row(*case, *sizes) for case in CASES for sizes in product(TENSOR, STAGES, TASKS)]
    result = {"sequences": SEQUENCES, "rows": rows}
    publish(result, markdown(result), arguments.output)
    return 0


def _row(link: str, tokens: int, tensor: int, stages: int, tasks: int) -> dict[str, Any]:
    """Seconds of a step of each side."""
    costs = _costs(link, tokens, tensor, stages, tasks)
    found = dict.fromkeys((*EXISTING, *SIDES), math.inf)

    def note(side: str, seconds: float) -> None:
        found[side] = min(found[side], seconds)

    for buckets, count in product((1, 2, 4, 8), MICRO_BATCHES):
        each = tasks // buckets
        most = SEQUENCES * each // count  # hybrid tasks, or halves, that have a sequence for each micro-batch
        for hybrids in (1, 2, 4, 8) if buckets * count <= MOST_UNITS else ():
            if hybrids > min(each, most):
                continue
            batch = tuple(range(each // hybrids))
            own = Unit.of([costs.hybrid(batch, count)] * hybrids)
            note("off" if hybrids == 1 else "in turns", step_seconds(own, buckets, count))
            note("best of both", step_seconds(own, buckets, count, own.faster_in_pairs))
            if hybrids == 1:
                note("pairs", step_seconds(own, buckets, count, [True] * stages))
            if most < 2 * hybrids:
                continue
            halved = Unit.of([costs.hybrid(batch, 2 * count)] * 2 * hybrids)
            note("halves", step_seconds(halved, buckets, count))
            note("best of both", step_seconds(halved, buckets, count, halved.faster_in_pairs))
            forward = tuple(map(min, own.forward, halved.forward))
            mixed = replace(own, forward=forward, backward=tuple(map(min, own.backward, halved.backward)))
            note("bound", step_seconds(mixed, buckets, count, mixed.faster_in_pairs))
            if hybrids == 1:
                note("bound", step_seconds(mixed, buckets, count, [True] * stages))
    found["auto"] = min(found[side] for side in EXISTING)
    found["best of both"] = min(found["auto"], found["pairs"], found["best of both"])
    found["bound"] = min(found["best of both"], found["bound"])
    return {
        "link": link,
        "tokens": tokens,
        "tensor": tensor,
        "stages": stages,
        "tasks": tasks,
        "share_of_messages": share_of_messages(costs),
        "seconds": {side: own for side, own in found.items() if math.isfinite(own)},
        "gains": {side: found["auto"] / found[side] - 1 for side in SIDES},
    }


def _costs(link: str, tokens: int, tensor: int, stages: int, tasks: int) -> StageCosts:
    from megatron_mux.fusion.profiler.roofline import roofline

    if link in LINKS:
        info = info_of("llama3-8b")
        profile = h100(info, tensor, LINKS[link])
    else:
        info = info_of("wide")
        profile = roofline(info.shape, {"device": "cpu", "kind": "cpu", "threads": 1}, 4, tensor)
        share = share_of_messages(equal_tasks(info, profile, tensor, 1, 1, SEQUENCES, tokens))
        factor = SHARES[link] / (1 - SHARES[link]) * (1 - share) / share
        profile = with_messages(profile, [factor * own for own in profile.curves["all_reduce"].forward])
    return equal_tasks(info, profile, tensor, tasks, stages, SEQUENCES, tokens)


@dataclass(frozen=True)
class Unit:
    """Seconds of a unit's passes through each stage.

    Attributes:
        forward, backward: `[S]` by themselves.
        pairs: `[S]` until the forward and the backward pass of a pair are done.
        transfer: `[S - 1]` to the next stage.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    pairs: tuple[tuple[float, float], ...]
    transfer: tuple[float, ...]

    @classmethod
    def of(cls, batches: Sequence[HybridCost]) -> Unit:
        """Of batches that are computed in turns."""
        from megatron_mux.fusion.planner.cost import bucket_cost

        cost = bucket_cost(batches)
        pairs = tuple(_pair(batches, stage) for stage in range(cost.stages))
        return cls(cost.forward, cost.backward, pairs, cost.transfer)

    @property
    def faster_in_pairs(self) -> list[bool]:
        """`[S]` whether a pair takes less than two passes by themselves."""
        both = zip(self.forward, self.backward, self.pairs, strict=True)
        return [max(pair) < forward + backward for forward, backward, pair in both]


def _pair(batches: Sequence[HybridCost], stage: int) -> tuple[float, float]:
    """Seconds until the forward pass of a unit and the backward pass of another, begun together, are done."""
    from megatron_mux.fusion.graphs.launch_order import PieceCost, best_order, simulate

    overlap = batches[0].overlap
    assert overlap is not None
    chains = []
    for is_backward, batch in product((False, True), batches):
        cost = batch.pass_cost(stage, is_backward)
        layers = overlap.stages[stage][:: -1 if is_backward else 1]
        inside, outside = cost.chain(layers, layers), PieceCost(cost.outside)
        chains.append([outside, *inside] if is_backward else [*inside, outside])
    timeline = simulate(chains, best_order(chains, "auto", overlap.share), overlap.share)
    ends = [0.0, 0.0]
    for span in (*timeline.compute, *timeline.messages):
        is_backward = span.chain >= len(batches)
        ends[is_backward] = max(ends[is_backward], span.end)
    return ends[0], ends[1]


def step_seconds(unit: Unit, buckets: int, micro_batches: int, paired: Sequence[bool] = ()) -> float:
    """Seconds of a step of equal buckets, with the best number of units in flight, if steps follow without a flush.

    Args:
        unit: Of all buckets.
        buckets: Of a step.
        micro_batches: Of each bucket.
        paired: `[S]` whether passes are paired.
    """
    from megatron_mux.fusion.planner.cost import seconds_per_step
    from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS
    from megatron_mux.pipeline.bucket import BucketCost
    from megatron_mux.pipeline.structured import StructuredRun

    stages = len(unit.forward)
    bucket = BucketCost(micro_batches, unit.forward, unit.backward, transfer=unit.transfer)

    def structured(steps: int) -> float:
        return StructuredRun([bucket] * buckets, None, [[1] * micro_batches] * buckets * steps).latency

    def in_order(steps: int, more: int, behind: int) -> float:
        # A bucket's step begins after its previous one.
        units = range(buckets * micro_batches * steps)
        awaited = [max(0, u // micro_batches - buckets + 1) * micro_batches for u in units]
        leads = [1 + more + behind * (stages - 1 - stage) for stage in range(stages)]
        pairs = paired or [False] * stages
        return latency(unit, [list(order(awaited, *own)) for own in zip(leads, pairs, strict=True)])

    # As many units in flight as in 1F1B, or in the structured template; and one more.
    leads = list(product((0, 1), (1, 2)))
    found = [seconds_per_step(partial(in_order, more=m, behind=b), 0.0, ROLLING_STEPS) for m, b in leads]
    found += [] if paired else [seconds_per_step(structured, 0.0, ROLLING_STEPS)]
    return min(seconds for seconds in found if seconds is not None)


Passes = tuple[int | None, int | None]
"""The units whose forward and whose backward pass a stage computes next."""


def order(awaited: Sequence[int], lead: int, paired: bool) -> Iterator[Passes]:
    """What a stage computes: `lead` forward passes, then backward and forward passes, one by one or in pairs.

    Args:
        awaited: For each unit, the backward passes before its forward pass.
        lead: Forward passes before the first backward pass.
        paired: Whether in pairs.
    """
    forward = backward = 0
    while backward < len(awaited):
        may = forward < len(awaited) and awaited[forward] <= backward
        if may and forward - backward < lead:
            yield forward, None
            forward += 1
        elif may and paired:
            yield forward, backward
            forward, backward = forward + 1, backward + 1
        else:
            yield None, backward
            backward += 1


def latency(unit: Unit, orders: Sequence[Sequence[Passes]]) -> float:
    """Seconds until all stages have computed what they are to, each in its order."""
    last = len(orders) - 1
    free, at = [0.0] * len(orders), [0] * len(orders)
    hidden: list[list[float]] = [[0.0] * len(orders[0]), *([] for _ in range(last))]
    gradient: list[list[float]] = [[] for _ in orders]

    def compute(stage: int, forward: int | None, backward: int | None) -> bool:
        inputs = [(forward, hidden[stage]), (backward, gradient[stage])]
        needed = [(own, arrived) for own, arrived in inputs if own is not None]
        if any(own >= len(arrived) for own, arrived in needed):
            return False
        start = max(free[stage], *(arrived[own] for own, arrived in needed))
        seconds = unit.pairs[stage] if len(needed) == 2 else (unit.forward[stage], unit.backward[stage])
        ends = [start + seconds[i] for i, own in enumerate((forward, backward)) if own is not None]
        free[stage] = max(ends)
        if forward is not None and stage == last:
            gradient[last].append(ends[0])
        elif forward is not None:
            _send(hidden[stage + 1], ends[0], unit.transfer[stage])
        if backward is not None and stage:
            _send(gradient[stage - 1], ends[-1], unit.transfer[stage - 1])
        return True

    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(orders):
            while at[stage] < len(own) and compute(stage, *own[at[stage]]):
                at[stage] += 1
                moved = True
    assert at == list(map(len, orders)), "a deadlock"
    return max(free)


def _send(arrived: list[float], start: float, seconds: float) -> None:
    arrived.append(max(start, *arrived[-1:]) + seconds if arrived else start + seconds)


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    rows = result["rows"]
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["link"], row["tokens"], row["tensor"], row["stages"]), []).append(row)
    lines = [
        [
            *case,
            f"{own[0]['share_of_messages']:.0%}",
            *(", ".join(f"{gain:+.1%}" for gain in row["gains"].values()) for row in own),
        ]
        for case, own in cases.items()
    ]
    tasks = " | ".join(f"{count} task{'s' * (count > 1)}" for count in TASKS)
    sides = "; ".join(f"{side} ({what})" for side, what in SIDES.items())
    about = (
        "Simulated from rooflines, not measured: how much faster than with `--mux-interleave auto` a pipeline's steps "
        f"would be with forward passes against backward passes in the steady state. Figures of a case: {sides}. Equal "
        f"LoRA tasks, {result['sequences']} sequences of so many tokens in a step each; H100: Llama-3-8B in bf16."
    )
    headings = f"link | tokens | TP | stages | messages of one task's step | {tasks}"
    return "\n".join([about, "", *table(headings, lines), "", _summary(rows)])


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """Medians and largest gains."""
    parts = []
    for name, counts in (("One task", (1,)), ("Several tasks", TASKS[1:])):
        for side in SIDES:
            gains = [row["gains"][side] for row in rows if row["tasks"] in counts]
            parts.append(
                f"{name}, {side}: median {statistics.median(gains):+.1%}, largest {max(gains):+.1%}."
            )
    return " ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
