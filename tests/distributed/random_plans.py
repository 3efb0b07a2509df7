"""Random plans, run as a plan from a file is, each under a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from megatron_mux.fusion.alignment import Mode, padded_lengths
from megatron_mux.fusion.check import check_plan
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, plan_for
from megatron_mux.fusion.schedules import PIPELINE_SCHEDULES, Schedule
from megatron_mux.fusion.step import (
    Lengths,
    StepChunks,
    bucket_costs,
    step_chunks,
    step_template,
)
from megatron_mux.pipeline.action import ChunkId
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.runtime import Parallel
from tests.distributed.counting import Counting
from tests.unit.fusion.strategies import groupings, one_each

COUNT = 80
TASKS = "abcdef"
BACKBONE = "b" * 8
LONGEST = 12
LIMIT = 60.0
"""Seconds that one plan may take: thousands of times what it does take."""


@dataclass(frozen=True)
class Case:
    """A plan, and the sequences of its steps.

    Attributes:
        plan: What every rank has.
        lengths: Of each step's tasks.
    """

    plan: Plan
    lengths: tuple[dict[str, Lengths], ...]

    def all_chunked(self, data_rank: int) -> list[StepChunks]:
        """The chunks of each step on one pipeline."""
        return [step_chunks(self.plan, own, data_rank) for own in self.lengths]

    def sizes(self, data_rank: int) -> list[Sequence[int]]:
        """Those of all steps, one after the other."""
        return [bucket for chunked in self.all_chunked(data_rank) for bucket in chunked.sizes]


@st.composite
def cases(draw: st.DrawFn, ranks: int, data: int) -> Case:
    """One to three steps of a plan of any policy, some of them with buckets that have nothing for a pipeline.

    One plan in three has two stages to each rank; some ask for another schedule.
    """
    virtual = draw(st.sampled_from([1, 1, 2]))
    stages = ranks * virtual
    schedules: list[Schedule] = ["planned", "planned", "interleaved" if virtual > 1 else "gpipe"]
    schedules.append("planned" if virtual > 1 else "1f1b")
    schedule = draw(st.sampled_from(schedules))
    names = TASKS[: draw(st.integers(1, len(TASKS)))]
    alignment: Mode = draw(st.sampled_from(["dense", "max-length", "longest"]))
    policy = draw(st.sampled_from(["auto", "auto", "spatial", "temporal", "serial"]))
    if policy == "auto":
        plan = draw(automatic(names, ranks, virtual, schedule))
    else:
        accumulation = {name: draw(st.integers(1, 3)) for name in names}
        count = draw(st.none() | st.integers(1, 4))
        plan = plan_for(policy, accumulation, stages, count, draw(st.none() | st.integers(4, 8)))  # type: ignore[arg-type]
    split = (1,) * stages if virtual > 1 else ()
    plan = replace(plan, virtual=virtual, split=split, schedule=schedule)
    plan = replace(plan, data=data, alignment=alignment, backbone=BACKBONE)
    pad_to = padded_lengths(alignment, dict.fromkeys(plan.tasks, LONGEST))

    def lengths(name: str) -> Lengths:
        tokens = tuple(draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3)))
        return Lengths(tokens, tuple(n // 2 for n in tokens), pad_to.get(name, 0))

    steps = draw(st.integers(1, 3)) if PIPELINE_SCHEDULES[schedule].rolls else 1
    return Case(plan, tuple({name: lengths(name) for name in plan.tasks} for _ in range(steps)))


@st.composite
def automatic(draw: st.DrawFn, names: str, ranks: int, virtual: int, schedule: Schedule) -> Plan:
    """A plan as the planner makes them, with or without a limit of memory."""

    def each(count: int, least: float = 0.1) -> tuple[float, ...]:
        return draw(one_each(st.floats(least, 10.0), count))

    stages = ranks * virtual
    buckets = []
    for grouping in draw(groupings(names)):
        count, chunk = draw(st.integers(1, 4)), draw(st.none() | st.integers(4, 8))
        bucket = Bucket(
            tuple(HybridTask(tuple(tasks)) for tasks in grouping),
            micro_batches=count,
            chunk=chunk,
            chunks=tuple(draw(st.lists(st.integers(1, 3 if chunk else 1), max_size=count))),
            forward=each(stages),
            backward=each(stages),
            memory=each(stages, 0.0),
            transfer=each(stages - 1, 0.0),
        )
        buckets.append(bucket)
    costs = {bucket: bucket_costs(bucket) for bucket in buckets}
    plan = Plan("auto", stages, tuple(buckets), virtual, schedule=schedule)
    if draw(st.booleans()):
        room = draw(st.floats(1.0, 3.0))
        most = [
            max(
                sum(cost.memory[s] for s in range(rank, stages, ranks)) * cost.chunks
                for cost in costs.values()
            )
            for rank in range(ranks)
        ]
        plan = replace(plan, activation_limit=tuple(room * own for own in most))
    return plan


def drawn(stages: int, data: int) -> list[Case]:
    """Random cases, the same on every rank: rank 0 draws them."""
    found: list[Case] = []
    if dist.get_rank() == 0:

        @seed(stages)
        @settings(
            max_examples=COUNT,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(cases(stages, data))
        def collect(case: Case) -> None:
            found.append(case)

        collect()
        assert len(found) == COUNT
    message = [found]
    dist.broadcast_object_list(message, src=0)
    return message[0]


def run(case: Case, parallel: Parallel, communicator: Communicator) -> None:
    """What a run does with a plan from a file: read it, check it, make its template, check that, compute.

    What is computed is compared with what should be.
    """
    plan = Plan.from_json(case.plan.to_json())
    mesh = Mesh(parallel.tp_size, parallel.pp_size, parallel.dp_size, case.plan.split)
    check_plan(plan, BACKBONE, mesh, case.plan.tasks)
    template = step_template(plan, case.sizes(parallel.dp_rank))
    all_chunked = case.all_chunked(parallel.dp_rank)
    period, stages = len(plan.buckets), parallel.pp_size * plan.virtual
    check(template, case.sizes(parallel.dp_rank), stages, period, plan.virtual)
    tokens = {
        ChunkId(step * period + chunk_id.bucket, chunk_id.micro_batch, chunk_id.chunk): sum(
            part.tokens for chunk in chunks for part in chunk
        )
        for step, chunked in enumerate(all_chunked)
        for chunk_id, chunks in chunked.chunks.items()
    }
    compute = Counting(parallel.pp_rank, parallel.pp_size, stages, tokens, period)
    execute(template, parallel.pp_rank, compute, communicator, torch.float64, stages=stages)
    assert compute.done == list(template[parallel.pp_rank]) and not compute.own
    assert compute.steps == [len(all_chunked)] * period


def run_all(parallel: Parallel) -> None:
    """Run each random plan within `LIMIT`; what goes wrong on a rank fails on all of them."""
    communicator = Communicator(parallel)
    problems: list[str] = []
    about: Case | None = None
    since = time.monotonic()

    def work() -> None:
        nonlocal about, since
        try:
            for case in drawn(parallel.pp_size, parallel.dp_size):
                about, since = case, time.monotonic()
                run(case, parallel, communicator)
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {error}: {about}")

    # What waits in a transfer cannot be interrupted: it is left behind.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive() and not problems:
        thread.join(0.5)
        if time.monotonic() - since > LIMIT:
            problems.append(f"not done after {LIMIT:.0f} s: {about}")
    if any(parallel.total([bool(problems)])):
        everyone: list[list[str]] = [[] for _ in range(parallel.world_size)]
        dist.all_gather_object(everyone, problems)
        raise AssertionError("\n".join(f"rank {i}: {own}" for i, own in enumerate(everyone) if own))
