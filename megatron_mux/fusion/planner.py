"""The planner: from tasks and a profile to a plan (MuxTune sections 3.3 to 3.5).

Fusion, grouping and the number of micro-batches come from `search.py`, on costs by equations 3 and 5. Its answer and
the plain policies are then worked out on the chunk grid of a step of typical lengths, cut and uncut, and the best is
taken: a plan is never predicted to be slower than one task after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_mux.backbone.shape import stage_layers
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Mode, Slice, Weights, padded_lengths, padding_of, paper_chunk
from megatron_mux.fusion.cost import bucket_cost
from megatron_mux.fusion.cost import fits as can_fit
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, plan_for
from megatron_mux.fusion.profile import Profile
from megatron_mux.fusion.search import DoesNotFitError, Layout, search
from megatron_mux.fusion.stage_cost import StageCosts
from megatron_mux.fusion.step import Lengths, StepGrid, bucket_costs, step_grid, step_template
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.simulate import simulate

Chunking = int | Literal["auto"] | None
"""Tokens of a chunk; `auto`: by predicted cost; None: packs are not cut."""

_WORTH = 0.02
"""How much better than a plain policy another layout must be predicted to be: predictions are no better than that."""

_MOST_ACTIONS = 8_000
"""Passes simulated while numbers of micro-batches and chunk sizes are compared: a quarter of a second."""

_MOST_COUNTS = 6
"""Numbers of micro-batches that are tried."""

_MANY = 32
"""Micro-batches a stage of all tasks: more of them fill no more of a pipeline's bubble."""

_PLAIN: tuple[Literal["spatial", "temporal"], ...] = ("spatial", "temporal")


@dataclass(frozen=True)
class Mesh:
    """How ranks are divided.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Stages.
        data: Pipelines.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.data


class Planner:
    """Makes plans for a backbone on a mesh.

    Args:
        profile: Seconds of operators at this tensor-parallel degree.
        info: The backbone (`BackboneInfo`).
        mesh: Its division.
        itemsize: Bytes of its dtype.
        recompute: Whether layers are computed again in the backward pass.
        memory_limit: Bytes that a rank may use; None: not limited.
        alignment: How sequences are padded, if at all.
        chunk: See `Chunking`.
        micro_batches: C; None: chosen.
        overlap: See `StageCosts`. Nothing runs hybrid tasks so yet: by default a plan does not count on it.
    """

    def __init__(
        self,
        profile: Profile,
        info: Any,
        mesh: Mesh,
        itemsize: int = 4,
        recompute: bool = False,
        memory_limit: float | None = None,
        alignment: Mode = "dense",
        chunk: Chunking = "auto",
        micro_batches: int | None = None,
        overlap: bool = False,
    ) -> None:
        self.overlap = overlap
        self.profile = profile
        self.info = info
        self.mesh = mesh
        self.itemsize = itemsize
        self.recompute = recompute
        self.memory_limit = memory_limit
        self.alignment: Mode = alignment
        self.chunk = chunk
        self.micro_batches = micro_batches
        layers, stages = info.shape.layers, mesh.pipeline
        self.stages = [stage_layers(layers, stage, stages) for stage in range(stages)]

    def plan(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """The best plan found for these tasks; a function of them alone.

        Raises:
            UserError: Some task does not fit into memory; says which, and what would make it fit.
        """
        ordered = [loads[name] for name in sorted(loads)]
        if not ordered:
            return self._finished(Plan("auto", self.mesh.pipeline, ()), None)
        desk = _Desk(self, ordered, self.alignment)
        best = self._best(desk)
        return self._finished(best, desk)

    def check(self, loads: Mapping[str, TaskLoad]) -> None:
        """Refuse tasks of which some cannot fit into memory however they are laid out; quick.

        Raises:
            UserError: Says which, and what would make it fit.
        """
        if self.memory_limit is None or not loads:
            return
        desk = _Desk(self, [loads[name] for name in sorted(loads)], self.alignment)
        if desk.too_large:
            raise UserError(*self._too_large(desk))

    def seconds(self, plan: Plan, loads: Mapping[str, TaskLoad]) -> float:
        """Predicted seconds of a step of these tasks by `plan`."""
        if not plan.buckets:
            return 0.0
        desk = _Desk(self, [loads[name] for name in sorted(plan.tasks)], plan.alignment)
        return desk.worked_out(plan).latency

    def fixed(self, policy: Literal["temporal", "spatial"], loads: Mapping[str, TaskLoad]) -> Plan:
        """What a plain policy means for these tasks, with predicted figures."""
        ordered = [loads[name] for name in sorted(loads)]
        desk = _Desk(self, ordered, self.alignment)
        return self._finished(desk.worked_out(desk.of_policy(policy)), desk)

    def _best(self, desk: _Desk) -> _WorkedOut:
        """The search's layout if it is worth it, else the best plain policy that fits."""
        plain = [found for policy in _PLAIN if (found := desk.worked_out(desk.of_policy(policy))).fits]
        if desk.too_large:
            raise UserError(*self._too_large(desk))
        candidates: list[_WorkedOut] = []
        try:
            layout = search(desk.costs, desk.tokens, self._counts(desk), desk.limit)
            candidates = [found for found in self._variants(desk, layout) if found.fits]
        except DoesNotFitError:
            pass  # at these numbers of micro-batches
        if not candidates and not plain:
            return desk.worked_out(desk.smallest())
        best = min(candidates, key=lambda found: found.latency, default=None)
        known = min(plain, key=lambda found: found.latency, default=None)
        if best is None or (known is not None and known.latency <= best.latency * (1 + _WORTH)):
            assert known is not None
            return known
        return best

    def _counts(self, desk: _Desk) -> list[int]:
        """Numbers of micro-batches to try: the fewest that users count on, doubled while it divides anything more."""
        if self.micro_batches is not None:
            return [self.micro_batches]
        least = max(load.accumulation for load in desk.loads)
        most = max(least, sum(len(load.tokens) for load in desk.loads) // self.mesh.data)
        counts = [least]
        while counts[-1] < most and len(counts) < _MOST_COUNTS:
            if self.memory_limit is None and counts[-1] * len(desk.loads) >= _MANY * self.mesh.pipeline:
                break  # a pipeline that is full does not get fuller
            counts.append(counts[-1] * 2)
        return counts

    def _variants(self, desk: _Desk, layout: Layout) -> Iterator[_WorkedOut]:
        """The layout with other numbers of micro-batches and with chunks: pipelines like them short and many."""
        spent = 0
        counts = [layout.micro_batches, *(c for c in self._counts(desk) if c != layout.micro_batches)]
        for count in counts if self.mesh.pipeline > 1 else counts[:1]:
            for chunk in self._chunks(desk):
                if spent > _MOST_ACTIONS:
                    return
                found = desk.worked_out(desk.of_layout(layout, count, chunk))
                spent += found.actions
                yield found

    def _chunks(self, desk: _Desk) -> list[int | None]:
        if self.chunk != "auto":
            return [self.chunk]
        if self.mesh.pipeline == 1:
            return [None]  # nobody waits for a shorter pass
        longest = max(max(load.tokens, default=1) for load in desk.loads)
        sizes = {paper_chunk([load.max_length for load in desk.loads]), 64, 128, 256, 512, 1024}
        return [None, *sorted(size for size in sizes if size < longest)]

    def _finished(self, found: _WorkedOut | Plan, desk: _Desk | None) -> Plan:
        """A plan with all that is to be said of it."""
        named = {
            "tensor": self.mesh.tensor,
            "data": self.mesh.data,
            "backbone": self.info.fingerprint,
            "costs": self.profile.said,
            "memory_limit_bytes": self.memory_limit,
        }
        if isinstance(found, Plan) or desk is None:
            assert isinstance(found, Plan)
            return replace(found, **named)
        raw = {load.name: load.tokens for load in desk.raw}
        padding = padding_of(raw, desk.pad_to)
        return replace(
            found.plan,
            **named,
            policy="auto",
            predicted_latency_s=found.latency,
            memory_bytes=found.memory,
            activation_limit=tuple(desk.limit or ()),
            alternatives=self._alternatives(desk),
            padding={
                "plan": padding.share,
                "within_tasks": padding.share_within_tasks,
                "zero_padded": padding.share_zero_padded,
            },
        )

    def _alternatives(self, desk: _Desk) -> dict[str, float | None]:
        """Predicted seconds of a step of every task by the plain policies; None: does not fit into memory."""
        found: dict[str, float | None] = {}
        alone = [desk.worked_out(desk.of_policy("spatial", [load])) for load in desk.loads]
        found["serial"] = sum(a.latency for a in alone) if all(a.fits for a in alone) else None
        for policy in _PLAIN:
            known = desk.worked_out(desk.of_policy(policy))
            found[policy] = known.latency if known.fits else None
        padded = _Desk(self, desk.raw, "longest")
        known = padded.worked_out(padded.of_policy("spatial"))
        found["padded"] = known.latency if known.fits else None
        return found

    def _too_large(self, desk: _Desk) -> list[str]:
        """Which tasks do not fit, and what would make them fit."""
        assert self.memory_limit is not None
        resident = desk.costs.resident()
        if max(resident) > self.memory_limit:
            stage = max(range(len(resident)), key=lambda s: resident[s])
            held = f"{_size(resident[stage])} that stage {stage} holds of the backbone and the adapters"
            more = "give more memory, more stages or tensor ranks, or bf16"
            return [f"the memory limit of {_size(self.memory_limit)} is less than the {held}: {more}"]
        said = []
        for task in desk.too_large:
            load, kept = desk.loads[task], desk.longest(task)
            longest = max(load.tokens)
            needed = max(r + k for r, k in zip(resident, kept, strict=True))
            room = min((self.memory_limit - r) / k for r, k in zip(resident, kept, strict=True) if k)
            length = math.floor(longest * room)
            advice = f"lower its data.max_length to {length}, " if length >= 2 else ""
            more = "" if self.recompute else "recompute layers (--recompute-granularity full), "
            said.append(
                f"task {load.name!r}: one sequence of {longest} tokens needs {_size(needed)} on a rank, the limit is "
                f"{_size(self.memory_limit)}: {advice}{more}or give more memory, stages or tensor ranks"
            )
        return said


@dataclass(frozen=True)
class _WorkedOut:
    """A plan on the chunk grid of a step of typical lengths."""

    plan: Plan
    latency: float
    memory: tuple[float, ...]
    fits: bool
    actions: int


class _Desk:
    """The tasks of one plan, and what is worked out for them."""

    def __init__(self, planner: Planner, loads: Sequence[TaskLoad], alignment: Mode) -> None:
        self.planner = planner
        self.raw = list(loads)
        self.alignment: Mode = alignment
        self.pad_to = padded_lengths(alignment, {load.name: load.max_length for load in loads})
        self.loads = [
            replace(load, tokens=(self.pad_to[load.name],) * len(load.tokens)) if self.pad_to else load
            for load in loads
        ]
        mesh = planner.mesh
        self.costs = StageCosts(
            planner.profile,
            planner.info.shape,
            self.loads,
            planner.stages,
            mesh.tensor,
            mesh.data,
            planner.itemsize,
            planner.recompute,
            planner.overlap,
        )
        self.weights: Weights = self.costs.weights()
        self.tokens = [float(load.total) for load in self.loads]
        self.lengths = {
            raw.name: Lengths(raw.tokens, raw.labels, self.pad_to.get(raw.name, 0)) for raw in loads
        }
        self.limit: list[float] | None = None
        if planner.memory_limit is not None:
            self.limit = [max(0.0, planner.memory_limit - r) for r in self.costs.resident()]
        self._index = {load.name: i for i, load in enumerate(loads)}
        self._known: dict[tuple[Bucket, ...], _WorkedOut] = {}

    @property
    def too_large(self) -> list[int]:
        """Tasks of which one sequence alone does not fit beside what is always there."""
        if self.limit is None:
            return []
        tight = any(r > (self.planner.memory_limit or 0.0) for r in self.costs.resident())
        return [
            task
            for task in range(len(self.loads))
            if tight or any(k > limit for k, limit in zip(self.longest(task), self.limit, strict=True))
        ]

    def longest(self, task: int) -> tuple[float, ...]:
        """`[S]` bytes kept of a task's longest sequence."""
        load = self.loads[task]
        i = max(range(len(load.tokens)), key=lambda i: load.tokens[i])
        return self.costs.chunk((Slice(load.name, i, 0, load.tokens[i]),)).memory

    def smallest(self) -> Plan:
        """What takes the least memory: one sequence at a time."""
        most = max(len(load.tokens) for load in self.loads)
        accumulation = {load.name: len(load.tokens) for load in self.loads}
        plan = plan_for("temporal", accumulation, self.planner.mesh.pipeline, most, None, self.alignment)
        return replace(plan, data=self.planner.mesh.data, weights=self.weights)

    def of_policy(
        self, policy: Literal["temporal", "spatial"], loads: Sequence[TaskLoad] | None = None
    ) -> Plan:
        """A plain policy's plan, of all tasks or of some."""
        planner = self.planner
        chunk = planner.chunk if isinstance(planner.chunk, int) else None
        accumulation = {load.name: load.accumulation for load in loads or self.loads}
        plan = plan_for(
            policy, accumulation, planner.mesh.pipeline, planner.micro_batches, chunk, self.alignment
        )
        return replace(plan, data=planner.mesh.data, weights=self.weights)

    def of_layout(self, layout: Layout, micro_batches: int, chunk: int | None) -> Plan:
        """A searched layout's plan."""
        names = [load.name for load in self.loads]
        buckets = tuple(
            Bucket(
                tuple(HybridTask(tuple(names[t] for t in hybrid)) for hybrid in bucket), micro_batches, chunk
            )
            for bucket in layout.buckets
        )
        mesh = self.planner.mesh
        return Plan(
            "auto", mesh.pipeline, buckets, data=mesh.data, alignment=self.alignment, weights=self.weights
        )

    def worked_out(self, plan: Plan) -> _WorkedOut:
        """Costs of its chunks, its template, its latency and memory."""
        if plan.buckets not in self._known:
            self._known[plan.buckets] = self._work_out(plan)
        return self._known[plan.buckets]

    def _work_out(self, plan: Plan) -> _WorkedOut:
        grids = [step_grid(plan, self.lengths, rank) for rank in range(plan.data)]
        costs = self._buckets(grids, len(plan.buckets))
        first = [
            cost.forward[0] * max(size, default=1) for cost, size in zip(costs, grids[0].sizes, strict=True)
        ]
        order = sorted(range(len(costs)), key=lambda i: (-first[i], i))
        # A micro-batch that does not fit alone has no template within the limit: its memory is reported without one.
        limit = self.limit if all(can_fit(costs[b], self.limit) for b in order) else None
        # Its passes are known now, so its template can be the structured one, whatever made it.
        plan = replace(
            plan,
            policy="auto",
            buckets=tuple(self._described(plan.buckets[b], costs[b], grids[0].sizes[b]) for b in order),
            activation_limit=tuple(limit or ()),
        )
        buckets = [bucket_costs(bucket) for bucket in plan.buckets]
        templates, simulations = [], []
        for grid in grids:
            sizes = [grid.sizes[b] for b in order]
            templates.append(step_template(plan, sizes))
            simulations.append(simulate(templates[-1], buckets, sizes=sizes))
        peaks = [max(found.peak(stage) for found in simulations) for stage in range(plan.stages)]
        fits = self.limit is None or all(
            peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, self.limit, strict=True)
        )
        tasks = [self._index[name] for name in plan.tasks]
        texts = tuple(tuple(str(action) for action in stage) for stage in templates[0])
        return _WorkedOut(
            replace(plan, template=texts),
            max(found.latency for found in simulations) + self.costs.step_overhead(tasks),
            tuple(r + p for r, p in zip(self.costs.resident(), peaks, strict=True)),
            fits,
            sum(len(stage) for template in templates for stage in template),
        )

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
        stages, count = range(self.planner.mesh.pipeline), len(costs)
        return BucketCost(
            micro_batches=max(len(own) for own in sizes),
            forward=tuple(sum(c.forward[s] for c in costs) / count for s in stages),
            backward=tuple(sum(c.backward[s] for c in costs) / count for s in stages),
            chunks=max(max(own, default=1) for own in sizes),
            memory=tuple(max(c.kept(s) for c in costs) for s in stages),
            transfer=tuple(sum(c.to_next(s) for c in costs) / count for s in stages[:-1]),
        )


def _size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
