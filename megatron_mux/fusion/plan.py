"""The plan: which tasks are batched, which are interleaved, in how many micro-batches, cut how. Data, nothing else.

A plan is the same on every rank, survives a JSON round trip and prints. It holds what was decided, and the predicted
costs that the order of passes follows from; the passes of a step (`step.py`) follow from the plan and the lengths of
the step's sequences, which every rank knows.

A plain policy needs no planner (`plan_for`): `spatial` puts all active tasks into one hybrid task (MuxTune's batching),
`temporal` gives each task its own bucket (its interleaving), `serial` runs one task at a time. The policy `auto` is the
planner's (`planner.py`). Between two steps tasks leave a plan, tasks join it, or a bucket gets smaller; the rest of it
stays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Mode, Weights
from megatron_mux.fusion.graphs.launch_order import LaunchOrder, PassCost
from megatron_mux.fusion.graphs.subgraphs import LayerSubgraphs
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.schedules import Schedule
from megatron_mux.kernels.low_rank.choice import KernelChoice
from megatron_mux.kernels.pointwise.choice import PointwiseName

Policy = Literal["serial", "temporal", "spatial", "auto"]
FORMAT: Literal[6] = 6

_Count = Annotated[int, Field(ge=1, le=65536, strict=True)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Amounts = tuple[_Amount, ...]


@dataclass(frozen=True)
class HybridTask:
    """Tasks batched together in space.

    Attributes:
        tasks: Their names, in row order.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True)
class InterleavingCosts:
    """What a stage's launch order was chosen by: predictions for the pass with the most batches.

    Attributes:
        forward, backward: The pass of each batch.
        layers: The kinds of the stage's layers, see `PassCost`.
        share: Part of the processor's time that a message takes while it is on its way.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    forward: tuple[PassCost, ...]
    backward: tuple[PassCost, ...]
    layers: tuple[Annotated[int, Field(ge=0, le=1, strict=True)], ...]
    share: Annotated[float, Field(ge=0, lt=1)] = 0.0


@dataclass(frozen=True)
class Bucket:
    """Hybrid tasks that share pipeline clocks.

    Attributes:
        hybrid_tasks: At least one; with several, each is a batch of its own within the clock.
        micro_batches: Number of micro-batches in one step of the bucket on each pipeline.
        chunk: Tokens of a chunk; None: packs are not cut.
        chunks: Number of chunks in each micro-batch of a step of typical lengths; empty without the planner.
        forward, backward: `[S]` predicted seconds of one chunk's passes; empty without the planner.
        memory: `[S]` predicted bytes kept of one chunk between its passes; empty without the planner.
        transfer: `[S - 1]` predicted seconds between stages; empty without the planner.
        halves: Whether each hybrid task is computed in two halves, which hide each other's messages.
        launch: `[S]` in which order the pieces of its hybrid tasks, or of their halves, are computed; empty: one after
            another.
        turns: `[S]` what these orders were chosen by, for pictures; empty without the planner.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    hybrid_tasks: Annotated[tuple[HybridTask, ...], Field(min_length=1)]
    micro_batches: _Count
    chunk: _Count | None = None
    chunks: tuple[_Count, ...] = ()
    forward: _Amounts = ()
    backward: _Amounts = ()
    memory: _Amounts = ()
    transfer: _Amounts = ()
    halves: Annotated[bool, Field(strict=True)] = False
    launch: tuple[LaunchOrder, ...] = ()
    turns: tuple[InterleavingCosts, ...] = ()

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """All task names of the bucket."""
        return tuple(name for hybrid in self.hybrid_tasks for name in hybrid.tasks)

    @property
    def label(self) -> str:
        """The text on its actions in pictures, and on its line in print."""
        return " | ".join("+".join(hybrid.tasks) for hybrid in self.hybrid_tasks)

    @property
    def batches(self) -> int:
        """Batches of a micro-batch that are computed side by side."""
        return len(self.hybrid_tasks) * (2 if self.halves else 1)


@dataclass(frozen=True)
class Plan:
    """What every rank computes in one step.

    Attributes:
        stages: Pipeline stages, virtual ones included.
        buckets: In the order in which they enter the pipeline.
        virtual: Stages per rank: stage `s` is on rank `s % (stages / virtual)`.
        split: Layers of each stage; empty: as even as possible.
        schedule: Which template orders the passes: see `fusion.step.step_template`.
        rolling: Steps between two flushes of the pipeline that predicted seconds assume.
        tensor, data: Ranks that share each layer; pipelines.
        expert, expert_tensor, managers: How experts are divided, see `Mesh`.
        backbone: The backbone's fingerprint; empty: for any backbone.
        alignment: How sequences are padded, if at all.
        weights: What micro-batches are balanced by.
        kernels: Which kernels compute the low-rank terms of each BaseOp; empty: the default ones.
        pointwise: Which kernels compute the element-wise work of frozen layers; None: no run has followed the plan.
        layers: The subgraphs of a layer of each kind, if somebody asked for them; for people.
        costs: Where the predictions come from, for people.
        predicted_latency_s: Seconds of one step of every task, its share of the flushes included.
        memory_bytes: Predicted peak of each rank of the pipeline.
        activation_limit: Bytes that each rank may keep between passes, resident bytes left out; a micro-batch that
            keeps more is in flight alone. Empty: no limit.
        replan_in: Steps until the plan that is being made in the background takes over; 0: none is being made.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    policy: Policy
    stages: _Count
    buckets: tuple[Bucket, ...]
    virtual: _Count = 1
    split: tuple[_Count, ...] = ()
    schedule: Schedule = "planned"
    rolling: _Count = 1
    tensor: _Count = 1
    data: _Count = 1
    expert: _Count = 1
    expert_tensor: _Count | None = None
    managers: Annotated[int, Field(ge=0, le=65536, strict=True)] = 0
    backbone: str = ""
    alignment: Mode = "dense"
    weights: Weights = field(default_factory=Weights)
    kernels: KernelChoice = ()
    pointwise: PointwiseName | None = None
    layers: tuple[LayerSubgraphs, ...] = ()
    costs: str = ""
    predicted_latency_s: _Amount | None = None
    memory_bytes: _Amounts = ()
    memory_limit_bytes: _Amount | None = None
    activation_limit: _Amounts = ()
    replan_in: Annotated[int, Field(ge=0, strict=True)] = 0
    format: Literal[6] = FORMAT

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.stages // self.virtual

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is for."""
        return Mesh(
            self.tensor,
            self.ranks,
            self.data,
            self.split,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            managers=self.managers,
        )

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """All task names."""
        return tuple(name for bucket in self.buckets for name in bucket.tasks)

    def to_json(self) -> dict[str, Any]:
        """A plain object for `plan.json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`, also after a trip through a JSON file.

        Raises:
            UserError: `value` is not a plan; every wrong entry is named by its place.
        """
        if not isinstance(value, Mapping):
            raise UserError("the plan: must be one JSON object")
        if value.get("format") != FORMAT:
            raise UserError(f"format: must be {FORMAT}, got {value.get('format')!r}: plan anew")
        try:
            # As JSON, in which lists are the tuples they stand for and nothing else is taken for what it is not.
            return _ADAPTER.validate_json(json.dumps(value), strict=True)
        except (TypeError, ValueError) as error:
            if not isinstance(error, ValidationError):
                raise UserError(f"the plan: {error}") from error
            raise UserError(*_described(error.errors())) from error

    def __str__(self) -> str:
        layers = f" of {'+'.join(map(str, self.split))} layers" if self.split else ""
        each = f", {self.virtual} to a rank" if self.virtual > 1 else ""
        lines = [f"plan: {self.policy}, {self.stages} stage{'s' if self.stages > 1 else ''}{layers}{each}"]
        for i, bucket in enumerate(self.buckets):
            hybrid = " | ".join(" + ".join(h.tasks) for h in bucket.hybrid_tasks)
            cut = f", chunks of {bucket.chunk}" if bucket.chunk else ""
            turns = ", in turns" if bucket.launch else ""
            halves = ", in halves" if bucket.halves else ""
            lines.append(
                f"  bucket {i}: {hybrid} in {bucket.micro_batches} micro-batch(es){cut}{halves}{turns}"
            )
        return "\n".join([*lines, *map(str, self.layers)])


_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)


def _described(problems: Sequence[Any]) -> list[str]:
    """A sentence for each wrong entry; entries that are wrong only because of one inside them are left out."""
    places = [problem["loc"] for problem in problems]
    said = []
    for problem in problems:
        inner = problem["loc"]
        if any(len(p) > len(inner) and p[: len(inner)] == inner for p in places):
            continue
        place = ""
        for part in inner:
            place += f"[{part}]" if isinstance(part, int) else f"{'.' if place else ''}{part}"
        said.append(f"{place or 'the plan'}: {problem['msg'][:1].lower()}{problem['msg'][1:]}")
    return said


def plan_for(
    policy: Literal["serial", "temporal", "spatial"],
    accumulation: Mapping[str, int],
    stages: int,
    micro_batches: int | None = None,
    chunk: int | None = None,
    alignment: Mode = "dense",
) -> Plan:
    """The plan of a plain policy.

    Args:
        policy: `serial` (the first task alone), `temporal` or `spatial`.
        accumulation: `gradient_accumulation_steps` of the active tasks, in order.
        micro_batches: Per bucket; by default the largest accumulation, and for `spatial` in a pipeline at least twice
            its stages, so that the bubble stays below a third.
        chunk: Tokens of a chunk; None: packs are not cut.

    Returns:
        The plan; without a bucket if no task is active.
    """

    def bucket(tasks: Sequence[str], fill: bool) -> Bucket:
        least = 2 * stages if fill and stages > 1 else 1
        count = micro_batches or max(least, *(accumulation[name] for name in tasks))
        return Bucket((HybridTask(tuple(tasks)),), count, chunk)

    names = list(accumulation)
    if policy == "serial":
        names = names[:1]
    if not names:
        buckets: tuple[Bucket, ...] = ()
    elif policy == "spatial":
        buckets = (bucket(names, fill=True),)
    else:
        # With several buckets in the pipeline at once, the other tasks fill the bubble.
        buckets = tuple(bucket([name], fill=len(names) == 1) for name in names)
    return Plan(policy, stages, buckets, alignment=alignment)


def keep_tasks(plan: Plan, names: Collection[str]) -> Plan:
    """The plan without the tasks that are not among `names`; predictions for all tasks together are dropped."""
    if set(plan.tasks) <= set(names):
        return plan
    buckets = []
    for bucket in plan.buckets:
        hybrids = [
            h if len(kept) == len(h.tasks) else HybridTask(kept)
            for h in bucket.hybrid_tasks
            if (kept := tuple(t for t in h.tasks if t in names))
        ]
        if hybrids:
            if len(hybrids) < len(bucket.hybrid_tasks):
                # Without one of its hybrid tasks a bucket has no launch order until it is planned anew.
                bucket = replace(bucket, launch=(), turns=())
            buckets.append(replace(bucket, hybrid_tasks=tuple(hybrids), chunks=()))
    return _changed(plan, buckets)


def add_tasks(plan: Plan, names: Sequence[str], micro_batches: int) -> Plan:
    """The plan with a new last bucket: one hybrid task of those `names` that the plan lacks."""
    new = tuple(sorted(set(names) - set(plan.tasks)))
    if not new:
        return plan
    # Its costs are unknown, so the template assumes equal passes: few micro-batches are in flight at once.
    return _changed(plan, (*plan.buckets, Bucket((HybridTask(new),), micro_batches)))


def shrink_bucket(plan: Plan, index: int, records: Mapping[str, int]) -> Plan | None:
    """The plan with less of a bucket in memory at a time; None if the bucket already computes single records.

    Args:
        index: The bucket: it is cut into twice as many micro-batches or, once those hold one record, into its tasks.
    """
    bucket = plan.buckets[index]

    def most(tasks: Sequence[str]) -> int:
        return math.ceil(sum(records[name] for name in tasks) / plan.data)

    count = max(most(hybrid.tasks) for hybrid in bucket.hybrid_tasks)
    if bucket.micro_batches < count:
        parts = [Bucket(bucket.hybrid_tasks, min(count, 2 * bucket.micro_batches), bucket.chunk)]
    elif len(bucket.tasks) > 1:
        parts = [Bucket((HybridTask((name,)),), most([name]), bucket.chunk) for name in bucket.tasks]
    else:
        return None
    buckets = (*plan.buckets[:index], *parts, *plan.buckets[index + 1 :])
    # 1F1B keeps the fewest in flight that fill the pipeline; GPipe and interleaved schedules keep more.
    schedule: Schedule = "1f1b" if plan.virtual == 1 else "planned"
    return replace(_changed(plan, buckets), schedule=schedule)


def _changed(plan: Plan, buckets: Sequence[Bucket]) -> Plan:
    """The plan with other buckets, without the predictions that were for the buckets it had."""
    return replace(plan, buckets=tuple(buckets), predicted_latency_s=None, memory_bytes=())


def dumps(plan: Plan) -> str:
    """The text of `plan.json`."""
    return json.dumps(plan.to_json(), indent=2) + "\n"
