"""Plans worked out: what a plan takes and keeps on the chunk grid of a step of typical lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from megatron_mux.backbone.split import Split, even_split, stage_layers
from megatron_mux.fusion.alignment import Mode, Weights, padded_lengths
from megatron_mux.fusion.cost import bucket_cost, kept_limit, works_with
from megatron_mux.fusion.judge import Layout
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import ROLLING, Bucket, HybridTask, Plan, Schedule, plan_for
from megatron_mux.fusion.profile import Profile
from megatron_mux.fusion.stage_cost import StageCosts
from megatron_mux.fusion.step import (
    Lengths,
    StepGrid,
    bucket_costs,
    lockstep,
    must_keep_step,
    step_grid,
    step_template,
)
from megatron_mux.memory.forms.kept import Recompute
from megatron_mux.memory.forms.methods import Method
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate
from megatron_mux.pipeline.template import Template

if TYPE_CHECKING:
    from megatron_mux.backbone.residence import Kind

Chunking = int | Literal["auto"] | None
"""Tokens of a chunk; `auto`: by predicted cost; None: packs are not cut."""


ROLLING_STEPS = 8
"""Steps between two flushes that plans count on: something is due about so often (a save, an evaluation, a look)."""


@dataclass(frozen=True)
class Mesh:
    """How ranks are divided.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Ranks of a pipeline.
        data: Pipelines.
        split: Layers of each stage; empty: a stage to a rank, as even as can be.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    split: Split = ()

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data

    @property
    def stages(self) -> int:
        """Of a pipeline, virtual ones included."""
        return len(self.split) or self.pipeline

    @property
    def virtual(self) -> int:
        """Stages of each rank."""
        return self.stages // self.pipeline

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """What a plan is for."""
        return cls(plan.tensor, plan.stages // plan.virtual, plan.data, plan.split)


@dataclass(frozen=True)
class Premises:
    """What plans are made on, whatever the tasks.

    Attributes:
        profile: Seconds of operators at this tensor-parallel degree.
        info: The backbone (`BackboneInfo`).
        mesh: Its division.
        itemsize: Bytes of its dtype.
        recompute: What is computed again in the backward pass.
        memory_limit: Bytes that a rank may use; None: not limited.
        alignment: How sequences are padded, if at all.
        chunk: See `Chunking`.
        micro_batches: C; None: chosen.
        schedule: See `Plan`.
        rolling: Steps between two flushes of the pipeline.
        residence: Where the backbone's weights live between uses.
        overlap: See `StageCosts`. Nothing runs hybrid tasks so yet: by default a plan does not count on it.
        sequence_parallel: Whether tensor ranks divide the rows between their regions.
    """

    profile: Profile
    info: Any
    mesh: Mesh = Mesh()
    itemsize: int = 4
    recompute: Recompute = "none"
    memory_limit: float | None = None
    alignment: Mode = "dense"
    chunk: Chunking = "auto"
    micro_batches: int | None = None
    overlap: bool = False
    schedule: Schedule = "planned"
    rolling: int = 1
    residence: Kind = "resident"
    sequence_parallel: bool = False

    @property
    def method(self) -> Method:
        """The division as memory sees it."""
        return Method(
            self.mesh.data,
            self.mesh.tensor,
            self.mesh.pipeline,
            sequence_parallel=self.sequence_parallel,
            zero=3 if self.residence.startswith("sharded") and self.mesh.data > 1 else 0,
            recompute=self.recompute,
            offload=self.residence.endswith("offloaded"),
        )

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return stage_layers(self.mesh.split or even_split(self.info.shape.layers, self.mesh.pipeline))

    def costs(self, loads: Sequence[TaskLoad]) -> StageCosts:
        """What these tasks cost."""
        return StageCosts(
            self.profile, self.info.shape, loads, self.stages, self.method, self.itemsize, self.overlap
        )


@dataclass(frozen=True)
class WorkedOut:
    """A plan, and what is predicted of it.

    Attributes:
        plan: With the costs of its buckets and its template.
        latency: Seconds of a step, of as many as there are between two flushes.
        memory: Bytes of each rank at the peak.
        fits: Whether that is within the limit, with the longest sequences there are too.
        actions: Passes of its template.
    """

    plan: Plan
    latency: float
    memory: tuple[float, ...]
    fits: bool
    actions: int


@dataclass(frozen=True)
class _Simulated:
    """Steps of one pipeline on paper; the attributes are those of `WorkedOut`."""

    template: Template
    latency: float
    peaks: list[float]
    actions: int


class Desk:
    """The tasks of one plan, and what is worked out for them."""

    def __init__(self, premises: Premises, loads: Sequence[TaskLoad], alignment: Mode) -> None:
        self.premises = premises
        self.raw = list(loads)
        self.alignment: Mode = alignment
        self.pad_to = padded_lengths(alignment, {load.name: load.max_length for load in loads})
        self.loads = [
            replace(load, tokens=(self.pad_to[load.name],) * len(load.tokens)) if self.pad_to else load
            for load in loads
        ]
        self.costs = premises.costs(self.loads)
        self.weights: Weights = self.costs.weights()
        self.tokens = [float(load.total) for load in self.loads]
        self.lengths = {
            raw.name: Lengths(raw.tokens, raw.labels, self.pad_to.get(raw.name, 0)) for raw in loads
        }
        self.limit: list[float] | None = None
        self.stage_limit: list[float] | None = None
        if premises.memory_limit is not None:
            self.limit = [max(0.0, premises.memory_limit - r) for r in self.resident]
            self.stage_limit = self._divided(self.limit)
        self._index = {load.name: i for i, load in enumerate(loads)}
        self._known: dict[tuple[Bucket, ...], WorkedOut] = {}

    @property
    def too_large(self) -> list[int]:
        """Tasks of which one sequence alone does not fit beside what is always there."""
        limit = self.stage_limit
        if limit is None:
            return []
        tight = any(r > (self.premises.memory_limit or 0.0) for r in self.resident)
        return [
            task
            for task in range(len(self.loads))
            if tight or any(k > most for k, most in zip(self.costs.longest(task), limit, strict=True))
        ]

    @cached_property
    def resident(self) -> list[float]:
        """Bytes that are always there on each rank, those beside its tensors included."""
        memory, ranks = self.costs.memory, self.premises.mesh.pipeline
        stages = memory.resident()
        return [memory.outside(ranks) + sum(stages[rank::ranks]) for rank in range(ranks)]

    def longest_that_fits(self, task: int) -> int:
        """Tokens of the longest sequence of a task that fits alone; 0 if none does."""
        limit = self.stage_limit
        assert limit is not None
        low, high = 0, self.loads[task].longest_sequence
        while low < high:
            middle = (low + high + 1) // 2
            needed = self.costs.longest(task, middle)
            fits = all(k <= most for k, most in zip(needed, limit, strict=True))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _divided(self, limit: Sequence[float]) -> list[float]:
        """`[S]` of what a rank may take for passes, each stage's share by its layers."""
        layers, ranks = [len(own) for own in self.premises.stages], len(limit)
        return [limit[s % ranks] * count / sum(layers[s % ranks :: ranks]) for s, count in enumerate(layers)]

    def smallest(self) -> Plan:
        """What takes the least memory: one sequence at a time."""
        most = max(len(load.tokens) for load in self.loads)
        accumulation = {load.name: len(load.tokens) for load in self.loads}
        plan = plan_for("temporal", accumulation, self.premises.mesh.stages, most, None, self.alignment)
        return self._here(plan)

    def of_policy(
        self,
        policy: Literal["temporal", "spatial"],
        loads: Sequence[TaskLoad] | None = None,
        micro_batches: int | None = None,
    ) -> Plan:
        """A plain policy's plan, of all tasks or of some."""
        premises = self.premises
        chunk = premises.chunk if isinstance(premises.chunk, int) else None
        accumulation = {load.name: load.accumulation for load in loads or self.loads}
        plan = plan_for(
            policy,
            accumulation,
            premises.mesh.stages,
            premises.micro_batches or micro_batches,
            chunk,
            self.alignment,
        )
        return self._here(plan)

    def of_layout(self, layout: Layout, micro_batches: int, chunk: int | None) -> Plan:
        """A searched layout's plan."""
        names = [load.name for load in self.loads]
        buckets = tuple(
            Bucket(
                tuple(HybridTask(tuple(names[t] for t in hybrid)) for hybrid in bucket), micro_batches, chunk
            )
            for bucket in layout.buckets
        )
        return self._here(Plan("auto", self.premises.mesh.stages, buckets, alignment=self.alignment))

    @property
    def _rolling(self) -> int:
        """Steps between two flushes, where there is a pipeline to flush and its schedule can do without."""
        rolls = self.premises.mesh.pipeline > 1 and self.premises.schedule in ROLLING
        return self.premises.rolling if rolls else 1

    def _here(self, plan: Plan) -> Plan:
        """A plan for this mesh."""
        mesh = self.premises.mesh
        return replace(
            plan,
            stages=mesh.stages,
            virtual=mesh.virtual,
            split=mesh.split,
            schedule=self.premises.schedule,
            rolling=self._rolling,
            data=mesh.data,
            weights=self.weights,
        )

    def worked_out(self, plan: Plan) -> WorkedOut:
        """Costs of its chunks, its template, its latency and memory."""
        if plan.buckets not in self._known:
            self._known[plan.buckets] = self._work_out(plan)
        return self._known[plan.buckets]

    def _work_out(self, plan: Plan) -> WorkedOut:
        grids = [step_grid(plan, self.lengths, rank) for rank in range(plan.data)]
        if self.premises.residence.startswith("sharded") or must_keep_step(plan):
            grids = lockstep(grids)
        costs = self._buckets(grids, len(plan.buckets))
        first = [
            cost.forward[0] * max(size, default=1) for cost, size in zip(costs, grids[0].sizes, strict=True)
        ]
        order = sorted(range(len(costs)), key=lambda i: (-first[i], i))
        # A micro-batch that does not fit alone has no template within the limit: its memory is reported without one.
        works = [works_with(costs, rank, plan.ranks) for rank in range(plan.ranks)]
        limit = None if self.limit is None else kept_limit(costs, self.limit)
        # Its passes are known now, so its template can be the structured one, whatever made it.
        plan = replace(
            plan,
            policy="auto",
            buckets=tuple(self._described(plan.buckets[b], costs[b], grids[0].sizes[b]) for b in order),
            activation_limit=tuple(limit or ()),
        )
        simulated = [self._simulated(plan, [grid.sizes[b] for b in order]) for grid in grids]
        peaks = [max(found.peaks[rank] for found in simulated) + works[rank] for rank in range(plan.ranks)]
        fits = self.limit is None or all(
            peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, self.limit, strict=True)
        )
        tasks = [self._index[name] for name in plan.tasks]
        texts = tuple(tuple(str(action) for action in stage) for stage in simulated[0].template)
        return WorkedOut(
            replace(plan, template=texts),
            max(found.latency for found in simulated) + self.costs.step_overhead(tasks),
            tuple(r + p for r, p in zip(self.resident, peaks, strict=True)),
            fits,
            sum(found.actions for found in simulated),
        )

    def _simulated(self, plan: Plan, sizes: list[tuple[int, ...]]) -> _Simulated:
        """A step on one pipeline, and where steps follow each other without a flush what each further one adds."""
        buckets = [bucket_costs(bucket) for bucket in plan.buckets]
        template = step_template(plan, sizes)
        one = simulate(template, buckets, sizes=sizes)
        latency, runs = one.latency, [one]
        steps = plan.rolling
        if steps > 1:
            two = simulate(step_template(plan, sizes * 2), buckets, sizes=sizes * 2)
            latency = (one.latency + (steps - 1) * (two.latency - one.latency)) / steps
            runs.append(two)
        peaks = [max(run.peak(rank) for run in runs) for rank in range(plan.ranks)]
        return _Simulated(template, latency, peaks, sum(len(rank) for run in runs for rank in run.timed))

    def _described(self, bucket: Bucket, cost: BucketCost, chunks: tuple[int, ...]) -> Bucket:
        """A bucket with what is predicted of it."""
        total = {load.name: float(load.total) for load in self.raw}
        return replace(
            bucket,
            hybrid_tasks=tuple(
                HybridTask(h.tasks, sum(total[t] for t in h.tasks)) for h in bucket.hybrid_tasks
            ),
            chunks=chunks,
            forward=cost.forward,
            backward=cost.backward,
            memory=cost.memory,
            transfer=cost.transfer,
        )

    def _buckets(self, grids: Sequence[StepGrid], count: int) -> list[BucketCost]:
        """Of each bucket, means of its chunks on all pipelines; the most that one of them keeps."""
        units = [(unit.bucket, chunks) for grid in grids for unit, chunks in grid.chunks.items()]
        costs = iter(self.costs.chunks([chunk for _, chunks in units for chunk in chunks]))
        of_bucket: list[list[BucketCost]] = [[] for _ in range(count)]
        for bucket, chunks in units:
            of_bucket[bucket].append(bucket_cost([next(costs) for _ in chunks], 1))
        return [self._mean(own, [grid.sizes[b] for grid in grids]) for b, own in enumerate(of_bucket)]

    def _mean(self, costs: Sequence[BucketCost], sizes: Sequence[tuple[int, ...]]) -> BucketCost:
        stages, count = range(self.premises.mesh.stages), len(costs)
        return BucketCost(
            micro_batches=max(len(own) for own in sizes),
            forward=tuple(sum(c.forward[s] for c in costs) / count for s in stages),
            backward=tuple(sum(c.backward[s] for c in costs) / count for s in stages),
            chunks=max(max(own, default=1) for own in sizes),
            memory=tuple(max(c.kept(s) for c in costs) for s in stages),
            working=tuple(max(c.works_with(s) for c in costs) for s in stages),
            transfer=tuple(sum(c.to_next(s) for c in costs) / count for s in stages[:-1]),
        )
