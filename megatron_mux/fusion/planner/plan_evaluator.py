"""Predicts what a plan takes, on the chunks of a step of typical lengths, and what it keeps: in such a step, and in
one in which each task has the longest record of its data in the place of a typical one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.alignment import padded_lengths
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, plan_for
from megatron_mux.fusion.planner.arrangement import Arrangement
from megatron_mux.fusion.planner.cost import (
    BUSY_ENOUGH,
    bucket_cost,
    entry_orders,
    kept_limit,
    lower_bounds,
)
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.planner.simulated_step import step_of
from megatron_mux.fusion.planner.step_memory import StepMemory
from megatron_mux.fusion.step import (
    Lengths,
    StepChunks,
    lockstep,
    must_keep_step,
    step_chunks,
)
from megatron_mux.pipeline.bucket import BucketCost

_MANY_PASSES = 10_000
"""Passes of a step beyond which one entry order is tried: an order changes how the pipeline is filled, which then
takes a hundredth of a step on eight stages, and that once in several steps."""

Sizes = tuple[int, ...]
"""Chunks of each micro-batch of a bucket, on one pipeline."""

_Bytes = npt.NDArray[np.float64]


class _Priced(NamedTuple):
    """A bucket.

    Attributes:
        cost: Mean seconds of its chunks in a typical step; the most bytes that one keeps and takes, also in a step in
            which each task has its longest record, if such steps count.
        sizes: Its chunks on each pipeline in a typical step.
        most: The same in a step with longest records, or of the typical one.
    """

    cost: BucketCost
    sizes: list[Sizes]
    most: list[Sizes]


@dataclass(frozen=True)
class Evaluation:
    """A plan and its predictions.

    Attributes:
        latency: Seconds of a step, averaged over the steps between two flushes.
        memory: `[ranks]` bytes at each rank's peak; empty if nobody asked for them.
        fits: Whether that is within the limit.
    """

    plan: Plan
    latency: float
    memory: tuple[float, ...]
    fits: bool


class PlanEvaluator:
    """Predicts the latency and memory of plans for the tasks of a context; remembers what it has evaluated.

    Args:
        context: With at least one task.

    Attributes:
        not_interleaved: The plan of its tasks that hides no messages, once somebody has asked for it.
    """

    def __init__(self, context: PlanningContext) -> None:
        mode = context.alignment
        self.raw = context.tasks
        self.pad_to = padded_lengths(mode, {name: load.max_length for name, load in self.raw.items()})
        padded = {
            name: replace(load, tokens=(self.pad_to[name],) * len(load.tokens)) if self.pad_to else load
            for name, load in self.raw.items()
        }
        self.context = replace(context, tasks=padded)
        self.loads = list(padded.values())
        self.costs = self.context.costs()
        self.weights = self.costs.weights()
        self.tokens = [float(load.total) for load in self.loads]
        self.lengths = self._lengths(self.raw)
        self._most_lengths = self._lengths({name: load.with_longest for name, load in self.raw.items()})
        self.limit: list[float] | None = None
        self.stage_limit: list[float] | None = None
        if context.memory_limit is not None:
            self.limit = [max(0.0, context.memory_limit - r) for r in self.resident]
            self.stage_limit = self._divided(self.limit)
        self.not_interleaved: Plan | None = None
        self._index = {load.name: i for i, load in enumerate(self.loads)}
        self._evaluated: dict[tuple[Bucket, ...], Evaluation] = {}
        self._buckets: dict[Bucket, _Priced] = {}
        self._of_several: dict[tuple[Bucket, ...], list[_Priced]] = {}

    def _lengths(self, loads: Mapping[str, TaskLoad]) -> dict[str, Lengths]:
        return {
            name: Lengths(load.tokens, load.labels, self.pad_to.get(name, 0), load.together)
            for name, load in loads.items()
        }

    # -- memory

    @cached_property
    def memory(self) -> StepMemory:
        """Of a typical step's tasks."""
        return self.costs.memory or self.context.step_memory()

    @cached_property
    def _most_memory(self) -> StepMemory:
        """Of a step in which each task has its longest record."""
        tasks = {name: load.with_longest for name, load in self.context.tasks.items()}
        return replace(self.context, tasks=tasks).step_memory()

    @cached_property
    def resident(self) -> list[float]:
        """`[ranks]` bytes that each rank always holds, those outside its tensors included."""
        memory, ranks = self.memory, self.context.mesh.pipeline
        stages = memory.persistent.tolist()
        return [memory.overhead + sum(stages[rank::ranks]) for rank in range(ranks)]

    @cached_property
    def updating(self) -> list[float]:
        """`[ranks]` bytes that each rank needs beside them to step an optimizer."""
        peaks: list[float] = self.memory.updating.reshape(-1, self.context.mesh.pipeline).max(axis=0).tolist()
        return peaks

    @cached_property
    def too_large(self) -> list[int]:
        """Tasks of which a single sequence does not fit beside the resident bytes."""
        limit = self.stage_limit
        if limit is None:
            return []
        assert self.limit is not None
        if any(needed > room for needed, room in zip(self.updating, self.limit, strict=True)):
            return list(range(len(self.loads)))
        return np.flatnonzero((self.largest > limit).any(axis=1)).tolist()

    @cached_property
    def largest(self) -> _Bytes:
        """`[K, S]` bytes of each task's record that takes most, of a typical step's and the longest there is."""
        of_steps = np.maximum(self.memory.records, self._most_memory.records).sum(axis=0)
        largest: _Bytes = np.maximum(of_steps, self.memory.longest(range(len(self.loads))))
        return largest

    def longest_that_fits(self, task: int) -> int:
        """Tokens of the longest sequence of a task that fits alone; 0 if none does."""
        limit = self.stage_limit
        assert limit is not None

        def is_too_long(length: int) -> bool:
            return bool((self.memory.longest([task], length) > limit).any())

        lengths = range(1, self.loads[task].longest_sequence + 1)
        return bisect_left(lengths, True, key=is_too_long)

    def _divided(self, limit: Sequence[float]) -> list[float]:
        """`[S]` share of each stage in its rank's limit, by its number of layers."""
        layers, ranks = [len(at) for at in self.context.stages], len(limit)
        return [limit[s % ranks] * count / sum(layers[s % ranks :: ranks]) for s, count in enumerate(layers)]

    # -- plans of these tasks

    def smallest(self) -> Plan:
        """The plan that takes the least memory: one record at a time."""
        records = {load.name: load.records for load in self.loads}
        most = max(records.values())
        plan = plan_for("temporal", records, self.context.mesh.stages, most, None, self.context.alignment)
        return self._on_mesh(plan)

    def of_policy(
        self,
        policy: Literal["temporal", "spatial"],
        loads: Sequence[TaskLoad] | None = None,
        micro_batches: int | None = None,
    ) -> Plan:
        """The plan of a plain policy, for all tasks or some of them."""
        context = self.context
        plan = plan_for(
            policy,
            {load.name: load.accumulation for load in loads or self.loads},
            context.mesh.stages,
            context.micro_batches or micro_batches,
            context.chunk if isinstance(context.chunk, int) else None,
            context.alignment,
        )
        return self._on_mesh(plan)

    def of_arrangement(self, arrangement: Arrangement, micro_batches: int, chunk: int | None) -> Plan:
        """The plan of an arrangement that the search found."""
        names = [load.name for load in self.loads]
        buckets = tuple(
            Bucket(
                tuple(HybridTask(tuple(names[t] for t in hybrid)) for hybrid in bucket), micro_batches, chunk
            )
            for bucket in arrangement.buckets
        )
        return self._on_mesh(
            Plan("auto", self.context.mesh.stages, buckets, alignment=self.context.alignment)
        )

    def _on_mesh(self, plan: Plan) -> Plan:
        mesh = self.context.mesh
        return replace(
            plan,
            stages=mesh.stages,
            virtual=mesh.virtual,
            split=mesh.split,
            schedule=self.context.schedule,
            rolling=self.context.steps_per_flush,
            data=mesh.data,
            weights=self.weights,
        )

    # -- predictions

    def alone(self) -> list[Evaluation]:
        """Each task in a pipeline of its own."""
        plans = [self.of_policy("spatial", [load]) for load in self.loads]
        self._priced(replace(plans[0], buckets=tuple(plan.buckets[0] for plan in plans)))  # all at once
        return [self.evaluate(plan) for plan in plans]

    def best_order(self, plan: Plan) -> Evaluation:
        """Evaluate a plan with its buckets in the entry order that makes its steps the shortest of those tried."""
        priced = self._priced(plan)
        passes = 2 * self.forwards(plan)
        enough = self.least(plan) * BUSY_ENOUGH
        best: Evaluation | None = None
        for order in entry_orders([p.cost for p in priced]):
            evaluation = self.evaluate(replace(plan, buckets=tuple(plan.buckets[i] for i in order)))
            if best is None or (not evaluation.fits, evaluation.latency) < (not best.fits, best.latency):
                best = evaluation
            if passes > _MANY_PASSES or best.latency <= enough:
                break
        assert best is not None
        return best

    def least(self, plan: Plan) -> float:
        """Seconds that no entry order of a plan's buckets can beat."""
        priced = self._priced(plan)
        total = 0.0
        for pipeline in range(plan.data):
            passes = [
                replace(p.cost, micro_batches=count) for p in priced if (count := sum(p.sizes[pipeline]))
            ]
            if passes:  # a pipeline may have none: there are fewer records
                total = max(total, *lower_bounds([passes], plan.rolling, plan.virtual))
        return self._overhead(plan) + total

    def forwards(self, plan: Plan) -> int:
        """Forward passes of a step on all stages of the first pipeline."""
        return plan.stages * sum(sum(p.sizes[0]) for p in self._priced(plan))

    def evaluate(self, plan: Plan) -> Evaluation:
        """Predict the costs of a plan's buckets, its latency and its memory; buckets enter in the plan's order.

        Without a limit passes count as if they took no memory: see `with_longest`.
        """
        if plan.buckets not in self._evaluated:
            self._evaluated[plan.buckets] = self._evaluate(plan, self._priced(plan))
        return self._evaluated[plan.buckets]

    def with_longest(self, evaluation: Evaluation) -> Evaluation:
        """The same with its memory, also in steps with longest records, which nothing but a limit asks for before."""
        if self.limit is not None or self.context.tables is None:
            return evaluation
        return self._evaluate(evaluation.plan, self._price(evaluation.plan, True), True)

    def _evaluate(self, plan: Plan, priced: Sequence[_Priced], with_memory: bool = False) -> Evaluation:
        costs = [p.cost for p in priced]
        limit = () if self.limit is None else kept_limit(costs, self.limit)
        plan = replace(
            plan,
            policy="auto",  # its costs are known now: whatever made it, its template is the structured one
            buckets=tuple(
                replace(
                    bucket,
                    chunks=p.sizes[0],
                    forward=p.cost.forward,
                    backward=p.cost.backward,
                    memory=p.cost.memory,
                    transfer=p.cost.transfer,
                )
                for bucket, p in zip(plan.buckets, priced, strict=True)
            ),
            activation_limit=tuple(limit),
        )
        steps = [[p.sizes[pipeline] for p in priced] for pipeline in range(plan.data)]
        longest = [[p.most[pipeline] for p in priced] for pipeline in range(plan.data)]
        runs = [step_of(plan, costs, sizes) for sizes in steps]
        others = [step_of(plan, costs, sizes) for sizes in longest if sizes not in steps]
        peaks = [max(taken[rank] for _, taken in (*runs, *others)) for rank in range(plan.ranks)]
        memory: tuple[float, ...] = ()
        if with_memory or self.limit is not None:
            peaks = [max(*pair) for pair in zip(peaks, self.updating, strict=True)]
            memory = tuple(r + p for r, p in zip(self.resident, peaks, strict=True))
        fits = self.limit is None or all(
            peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, self.limit, strict=True)
        )
        return Evaluation(
            plan,
            max(latency for latency, _ in runs) + self._overhead(plan),
            memory,
            fits,
        )

    def _overhead(self, plan: Plan) -> float:
        return self.costs.step_overhead([[self._index[name] for name in b.tasks] for b in plan.buckets])

    def _priced(self, plan: Plan) -> list[_Priced]:
        """For each bucket, the cost of its chunks and their numbers on each pipeline."""
        limited = self.limit is not None
        if plan.data > 1:  # where one bucket's sequences go depends on what is before it
            if plan.buckets not in self._of_several:
                self._of_several[plan.buckets] = self._price(plan, limited)
            return self._of_several[plan.buckets]
        new = tuple(bucket for bucket in plan.buckets if bucket not in self._buckets)
        if new:
            self._buckets.update(zip(new, self._price(replace(plan, buckets=new), limited), strict=True))
        return [self._buckets[bucket] for bucket in plan.buckets]

    def _price(self, plan: Plan, with_longest: bool) -> list[_Priced]:
        typical = self._steps(plan, self.lengths)
        sizes = _by_bucket(typical)
        costs = self._mean_costs(typical, sizes)
        if not with_longest:
            return [_Priced(*each) for each in zip(costs, sizes, sizes, strict=True)]
        longest = typical if self._most_lengths == self.lengths else self._steps(plan, self._most_lengths)
        most = self._most_bytes(self.memory, typical)
        if longest is not typical:
            most = np.maximum(most, self._most_bytes(self._most_memory, longest))
        counted = [
            replace(cost, memory=tuple(kept), working=tuple(working))
            for cost, kept, working in zip(costs, *most.tolist(), strict=True)
        ]
        return [_Priced(*each) for each in zip(counted, sizes, _by_bucket(longest), strict=True)]

    def _steps(self, plan: Plan, lengths: Mapping[str, Lengths]) -> list[StepChunks]:
        """What each pipeline computes in a step of these lengths."""
        steps = [step_chunks(plan, lengths, rank) for rank in range(plan.data)]
        return lockstep(steps) if self.context.in_step or must_keep_step(plan) else steps

    def _mean_costs(self, steps: Sequence[StepChunks], sizes: Sequence[Sequence[Sizes]]) -> list[BucketCost]:
        """For each bucket, the mean seconds of its chunks on all pipelines."""
        of_buckets = [(at.bucket, chunks) for step in steps for at, chunks in step.chunks.items()]
        costs = iter(self.costs.chunks([chunk for _, chunks in of_buckets for chunk in chunks]))
        of_bucket: list[list[BucketCost]] = [[] for _ in sizes]
        for bucket, chunks in of_buckets:
            of_bucket[bucket].append(bucket_cost([next(costs) for _ in chunks]))
        return [self._mean(costs, size) for costs, size in zip(of_bucket, sizes, strict=True)]

    def _most_bytes(self, memory: StepMemory, steps: Sequence[StepChunks]) -> _Bytes:
        """`[2, buckets, S]` the most bytes that a chunk of these steps keeps, and that its passes take besides."""
        of_buckets = [(at.bucket, chunks) for step in steps for at, chunks in step.chunks.items()]
        taken = memory.of_chunks([chunk for _, chunks in of_buckets for chunk in chunks])
        starts = np.cumsum([0, *(len(chunks) for _, chunks in of_buckets[:-1])])
        together = np.maximum if self.costs.interleaving is None else np.add  # as in `bucket_cost`
        by_unit = np.add.reduceat(taken.kept, starts), together.reduceat(taken.working, starts)
        bucket = np.array([b for b, _ in of_buckets])
        is_of = [bucket == b for b in range(len(steps[0].sizes))]
        return np.array([[part[of].max(axis=0) for of in is_of] for part in by_unit])

    def _mean(self, costs: Sequence[BucketCost], sizes: Sequence[Sizes]) -> BucketCost:
        stages, count = range(self.context.mesh.stages), len(costs)
        return BucketCost(
            micro_batches=max(len(counts) for counts in sizes),
            forward=tuple(sum(c.forward[s] for c in costs) / count for s in stages),
            backward=tuple(sum(c.backward[s] for c in costs) / count for s in stages),
            chunks=max(max(counts, default=1) for counts in sizes),
            transfer=tuple(sum(c.transfer[s] for c in costs) / count for s in stages[:-1]),
        )


def _by_bucket(steps: Sequence[StepChunks]) -> list[list[Sizes]]:
    """For each bucket its chunks on each pipeline."""
    return [list(each) for each in zip(*(step.sizes for step in steps), strict=True)]
