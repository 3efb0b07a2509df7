"""A process of `pipeline.py`: runs one stage for all sides, in turns."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from engine_bench import (
    QV,
    SwitchablePlanning,
    load_or_measure_profile,
    loads_of,
    random_backbone,
    spec_of,
)
from megatron_side import MegatronEngine
from pipeline_cases import CASES, LENGTHS, PICTURED, SIDES, TOKENS
from processes import pin_to_core
from script import environment
from workload import TaskShape, random_records

from megatron_mux.attributes import replaced
from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.clock import Clock
from megatron_mux.engine import Task
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.balance import balanced_split
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import ROLLING_STEPS, PlanningContext
from megatron_mux.fusion.profiler.profile_store import about_run, find_profile
from megatron_mux.fusion.step import step_template
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import Simulation, simulate
from megatron_mux.pipeline.trace import to_trace
from megatron_mux.runtime import Parallel, initialize
from megatron_mux.tasks import TaskSpec
from tests.reference.records import Records


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all cases, or what `--picture` draws; returns the result on rank 0 and {} on the other rank."""
    rank = pin_to_core()
    parallel = initialize(device=arguments.device)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    path = random_backbone(arguments.backbone_shape, dtype, rank)
    backbone = Backbone.load(path, parallel, dtype)
    if arguments.picture is None:
        profile = load_or_measure_profile(backbone)
    else:  # a roofline will do: its plan is priced by what is measured
        profile = find_profile(backbone.shape, about_run(backbone.shape, arguments.device, dtype, 1))
    info, result = backbone.info, environment(path.name, str(dtype), 1, arguments.device)
    del backbone
    parallel = initialize(pipeline_parallel=2, device=arguments.device)
    context = PlanningContext(profile, info, Mesh(pipeline=2), dtype.itemsize, rolling=ROLLING_STEPS)
    cases: list[dict[str, Any]] = []
    for chosen in (CASES[number - 1] for number in arguments.cases):
        chosen = {**chosen, "steps": arguments.steps or chosen["steps"]}
        specs, records = _tasks(chosen, info.shape.vocab)
        loads = loads_of(specs, records, info)
        split = balanced_split(context.with_tasks(loads))
        stages = load_stages(path, parallel, dtype, split=split)
        planning = SwitchablePlanning()
        engine = MegatronEngine(stages, parallel, planning)
        engine.register_tasks([Task(s, r) for s, r in zip(specs, records, strict=True)])
        planner = Planner(context.with_split(split))
        sides = _sides(planner, loads, padded=chosen["records"] == "padded")
        bench = _Bench(engine, planning, parallel, sides, chosen["steps"])
        if arguments.picture is not None:
            schedules = bench.schedules()
            return {"trace": to_trace(schedules)} if rank == 0 else {}
        case = {**chosen, **bench.measure(arguments.turns)}
        case["tokens"] = sum(load.total for load in loads.values()) * chosen["steps"]
        cases.append(case)
        result |= {"split": split}
        if rank == 0:
            print(json.dumps(case), file=sys.stderr, flush=True)
    result |= {"cases": cases, "turns": arguments.turns, "lengths": LENGTHS, "tokens": TOKENS}
    return result if rank == 0 else {}


def _tasks(case: dict[str, Any], vocab: int) -> tuple[list[TaskSpec], list[Records]]:
    """Make tasks with the same records in every step and a negligible learning rate, so that sides are comparable."""
    specs, records = [], []
    for i, length in enumerate(LENGTHS):
        batch = TOKENS // length
        accumulated = {"gradient_accumulation_steps": case["micro_batches"]}
        specs.append(spec_of(f"task-{i}-{length}", QV, batch, length, **accumulated))
        count = batch * case["micro_batches"]
        pairs = random_records(TaskShape("", batch, length), count, vocab, seed=i)
        if case["records"] == "same shapes":
            generator = torch.Generator().manual_seed(i)
            tokens = [torch.randint(3, vocab, (length,), generator=generator) for _ in range(count)]
            pairs = [(own, torch.arange(length) >= length // 2) for own in tokens]
        records.append(Records(pairs))
    return specs, records


def _sides(planner: Planner, loads: dict[str, TaskLoad], padded: bool) -> dict[str, list[Plan]]:
    """Make the plans of each side, which it runs one after another."""
    alone = replace(planner.context, alignment="max-length") if padded else planner.context
    accumulation = {name: load.accumulation for name, load in loads.items()}
    fixed = {
        "megatron": [
            Planner(replace(alone, micro_batches=accumulation[name])).fixed("temporal", {name: load})
            for name, load in loads.items()
        ],
        "spatial": [planner.fixed("spatial", loads)],
        "temporal": [planner.fixed("temporal", loads)],
        "auto": [planner.plan(loads)],
    }
    return {side: fixed[side] for side in SIDES}


@dataclass
class _Bench:
    """Runs the sides on one engine."""

    engine: MegatronEngine
    planning: SwitchablePlanning
    parallel: Parallel
    sides: dict[str, list[Plan]]
    steps: int

    def measure(self, turns: int) -> dict[str, Any]:
        """Measure seconds and bubbles of each turn, and compare losses."""
        names, losses = list(self.sides), {}
        for name in names:  # warm up
            losses[name] = self._losses(name)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        bubbles: dict[str, list[list[float]]] = {name: [] for name in names[1:]}
        simulated: dict[str, list[float]] = {name: [] for name in names[1:]}
        for turn in range(turns):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                timed: list[TimedAction] = []
                seconds[name].append(self._seconds(name, timed))
                if name in bubbles:
                    everyone = self._gathered(timed)
                    span = _span(everyone)
                    bubbles[name].append([1 - sum(t.stop - t.start for t in own) / span for own in everyone])
                    simulated[name].append(self._simulated(name, everyone))
        first = next(iter(losses.values()))
        different = [abs(own[task] / loss - 1) for own in losses.values() for task, loss in first.items()]
        return {
            "seconds": seconds,
            "bubble": {
                n: [statistics.median(s) for s in zip(*own, strict=True)] for n, own in bubbles.items()
            },
            "simulated": {name: statistics.median(own) for name, own in simulated.items()},
            "buckets": {
                n: [[b.label, b.micro_batches] for p in plans for b in p.buckets]
                for n, plans in self.sides.items()
            },
            "largest_loss_difference": max(different),
        }

    def _losses(self, side: str) -> dict[str, float]:
        self.engine.uses_megatron = side == "megatron"
        found: dict[str, float] = {}
        for plan in self.sides[side]:
            self.planning.plan = plan
            found |= {name: result.loss for name, result in self.engine.step().items()}
        return found

    def _seconds(self, side: str, timed: list[TimedAction]) -> float:
        """Run a turn; returns its seconds, from the common start to the end of the slowest process."""
        self.engine.uses_megatron = side == "megatron"
        dist.barrier()
        start = time.perf_counter()
        if self.engine.uses_megatron:
            for _ in range(self.steps):
                self._losses(side)
        else:
            self.planning.plan = self.sides[side][0]
            taken = 0
            while taken < self.steps:
                taken += len(self.engine.steps(self.steps - taken, timed.append))
        return self.parallel.most([time.perf_counter() - start])[0]

    def _gathered(self, timed: list[TimedAction]) -> list[list[TimedAction]]:
        everyone: list[list[TimedAction]] = [[], []]
        dist.all_gather_object(everyone, timed)
        return everyone

    def _simulated(self, side: str, everyone: Sequence[Sequence[TimedAction]]) -> float:
        """Simulate a turn with the measured mean times of a bucket's passes; returns simulated over measured time."""
        plan = self.sides[side][0]
        return self._simulate(plan, everyone).latency / _span(everyone)

    def _simulate(self, plan: Plan, everyone: Sequence[Sequence[TimedAction]]) -> Simulation:
        """Simulate the steps of `everyone` with the mean times of a bucket's passes in them."""
        sizes = _sizes(everyone[0])
        costs = []
        for bucket in range(len(plan.buckets)):
            own = [[t for t in rank if t.action.bucket % len(plan.buckets) == bucket] for rank in everyone]
            forward, backward, norm, update = ([_mean(rank, kind) for rank in own] for kind in "FBNU")
            ends = tuple(n + u for n, u in zip(norm, update, strict=True))
            costs.append(BucketCost(1, tuple(forward), tuple(backward), update=ends))
        labels = [bucket.label for bucket in plan.buckets]
        return simulate(step_template(plan, sizes), costs, labels, sizes)

    def schedules(self) -> dict[str, list[TimedAction]]:
        """Simulate one step of all tasks: by 1F1B one task after another, and as `auto` plans it.

        Each plan's passes are timed on the stage that computes them, in seconds of its processor, which other programs
        of the machine do not lengthen. Transfers take no time on either side.
        """
        self.engine.uses_megatron = False
        found: dict[str, list[TimedAction]] = {}
        for side, name in PICTURED.items():
            done = found.setdefault(name, [])
            for plan in self.sides[side]:
                self.planning.plan = replace(plan, schedule="1f1b") if side == "megatron" else plan
                timed: list[TimedAction] = []
                self.engine.steps(1)  # warm up
                with replaced(Clock, "mark", lambda clock: time.thread_time()):
                    self.engine.steps(1, timed.append)
                end = max((action.stop for action in done), default=0.0)
                for stage in self._simulate(self.planning.plan, self._gathered(timed)).timed:
                    done += [replace(t, start=t.start + end, stop=t.stop + end) for t in stage]
        return found


def _sizes(timed: Sequence[TimedAction]) -> list[list[int]]:
    """Return the number of chunks of each micro-batch of each bucket, from the actions that ran."""
    found: dict[int, dict[int, int]] = {}
    for one in timed:
        action = one.action
        chunks = found.setdefault(action.bucket, {})
        if action.kind == "F":
            chunks[action.micro_batch] = max(chunks.get(action.micro_batch, 0), action.chunk + 1)
    return [[found[b][m] for m in sorted(found[b])] for b in sorted(found)]


def _mean(timed: Sequence[TimedAction], kinds: str) -> float:
    own = [t.stop - t.start for t in timed if t.action.kind in kinds]
    return statistics.fmean(own) if own else 0.0


def _span(everyone: Sequence[Sequence[TimedAction]]) -> float:
    """Seconds from the first action to the end of the last, on any rank; processes of one machine share a clock."""
    return max(t.stop for own in everyone for t in own) - min(t.start for own in everyone for t in own)
