"""The plan: which tasks are batched, which are interleaved, in how many micro-batches, cut how. Data, nothing else.

A plan follows from a policy alone (`plan_for`: `spatial` puts all active tasks into one hybrid task, MuxTune's
batching; `temporal` gives each task a bucket of its own, its interleaving; `serial` is one task at a time) or from the
planner (`planner.py`, policy `auto`). Either way it is the same on every rank, survives a trip through JSON and prints.
What a step does with it (`step.py`) follows from the plan and from the step's lengths, which every rank knows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Mode, Weights

Policy = Literal["serial", "temporal", "spatial", "auto"]
Schedule = Literal["planned", "1f1b", "gpipe", "interleaved"]
ROLLING: tuple[Schedule, ...] = ("planned", "1f1b")
"""Schedules whose steps can follow each other without a flush."""
FORMAT: Literal[4] = 4

_Count = Annotated[int, Field(ge=1, le=65536, strict=True)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Amounts = tuple[_Amount, ...]


@dataclass(frozen=True)
class HybridTask:
    """Tasks batched together in space.

    Attributes:
        tasks: Their names, in row order.
        tokens: Of one step, all of them together, as the planner expects.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tasks: Annotated[tuple[str, ...], Field(min_length=1)]
    tokens: _Amount = 0.0


@dataclass(frozen=True)
class Bucket:
    """Hybrid tasks that share pipeline clocks.

    Attributes:
        hybrid_tasks: At least one; with several, each is a batch of its own within the clock.
        micro_batches: In how many micro-batches one step of the bucket is computed on each pipeline.
        chunk: Tokens of a chunk; None: packs are not cut.
        chunks: Of each micro-batch of a step of typical lengths; empty where nobody has looked at lengths.
        forward, backward: `[S]` predicted seconds of one chunk's passes; empty without the planner.
        memory: `[S]` predicted bytes kept of one chunk between its passes.
        transfer: `[S - 1]` predicted seconds between stages.
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

    @property
    def tasks(self) -> tuple[str, ...]:
        """All task names of the bucket."""
        return tuple(name for hybrid in self.hybrid_tasks for name in hybrid.tasks)

    @property
    def label(self) -> str:
        """What is written on its actions in pictures, and on its line in print."""
        return " | ".join("+".join(hybrid.tasks) for hybrid in self.hybrid_tasks)


@dataclass(frozen=True)
class Plan:
    """What every rank computes in one step.

    Attributes:
        policy: Where it comes from.
        stages: Pipeline stages, virtual ones included.
        buckets: In the order they enter the pipeline.
        virtual: Stages of each rank: stage `s` is on rank `s % (stages / virtual)`.
        split: Layers of each stage; empty: as even as can be.
        schedule: What its template is: see `fusion.step.step_template`.
        rolling: Steps between two flushes of the pipeline that predicted seconds are for.
        tensor, data: Ranks that share each layer; pipelines.
        backbone: The backbone's fingerprint; empty: not bound to one.
        alignment: How sequences are padded, if at all.
        weights: What micro-batches are balanced by.
        template: Each rank's actions of a step of typical lengths, in their string form; empty without the planner.
        costs: Where predicted figures come from.
        predicted_latency_s: Of one step of every task, its share of the flushes included.
        alternatives: The same for `serial`, `temporal`, `spatial` and `padded` (spatial, all sequences padded to the
            longest `max_length`).
        memory_bytes: Predicted peak of each rank of the pipeline.
        memory_limit_bytes: What a rank may use; None: not limited.
        activation_limit: Bytes that each rank may keep between passes, what is always there left out.
        padding: Shares of computed tokens that carry no information: `plan`, `within_tasks`, `zero_padded`.
        replan_in: Steps after which this plan gives way to the one that is being made beside it; 0: none is.
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
    backbone: str = ""
    alignment: Mode = "dense"
    weights: Weights = field(default_factory=Weights)
    template: tuple[tuple[str, ...], ...] = ()
    costs: str = ""
    predicted_latency_s: _Amount | None = None
    alternatives: dict[str, _Amount | None] = field(default_factory=dict)
    memory_bytes: _Amounts = ()
    memory_limit_bytes: _Amount | None = None
    activation_limit: _Amounts = ()
    padding: dict[str, _Amount] = field(default_factory=dict)
    replan_in: Annotated[int, Field(ge=0, strict=True)] = 0
    format: Literal[4] = FORMAT

    @property
    def ranks(self) -> int:
        """Of a pipeline."""
        return self.stages // self.virtual

    @property
    def tasks(self) -> tuple[str, ...]:
        """All task names."""
        return tuple(name for bucket in self.buckets for name in bucket.tasks)

    def bucket_of(self, task: str) -> int:
        """Index of the bucket that holds a task.

        Raises:
            KeyError: None does.
        """
        for i, bucket in enumerate(self.buckets):
            if task in bucket.tasks:
                return i
        raise KeyError(task)

    def only(self, names: Collection[str]) -> Plan:
        """The same without the tasks that are not among `names`; what was predicted for all of them is dropped."""
        if set(self.tasks) <= set(names):
            return self
        buckets = []
        for bucket in self.buckets:
            hybrids = [
                h if len(kept) == len(h.tasks) else HybridTask(kept)
                for h in bucket.hybrid_tasks
                if (kept := tuple(t for t in h.tasks if t in names))
            ]
            if hybrids:
                buckets.append(replace(bucket, hybrid_tasks=tuple(hybrids), chunks=()))
        return replace(self, buckets=tuple(buckets), **_UNKNOWN)

    def with_tasks(self, names: Sequence[str], micro_batches: int) -> Plan:
        """The same with a hybrid task of the tasks that it lacks, last to enter the pipeline."""
        new = tuple(sorted(set(names) - set(self.tasks)))
        if not new:
            return self
        # Nothing is predicted of it, so the template takes all passes to be alike: few micro-batches are alive at once.
        bucket = Bucket((HybridTask(new),), micro_batches)
        return replace(self, buckets=(*self.buckets, bucket), **_UNKNOWN)

    def smaller(self, index: int, sequences: Mapping[str, int]) -> Plan | None:
        """The same with less of a bucket in memory at a time; None if it computes a single sequence already.

        Args:
            index: The bucket: cut into twice as many micro-batches, or once those have one sequence, into its tasks.
            sequences: Of a step of each task.
        """
        bucket = self.buckets[index]

        def most(tasks: Sequence[str]) -> int:
            return math.ceil(sum(sequences[name] for name in tasks) / self.data)

        count = max(most(hybrid.tasks) for hybrid in bucket.hybrid_tasks)
        if bucket.micro_batches < count:
            parts = [Bucket(bucket.hybrid_tasks, min(count, 2 * bucket.micro_batches), bucket.chunk)]
        elif len(bucket.tasks) > 1:
            parts = [Bucket((HybridTask((name,)),), most([name]), bucket.chunk) for name in bucket.tasks]
        else:
            return None
        buckets = (*self.buckets[:index], *parts, *self.buckets[index + 1 :])
        # The fewest in flight that fill the pipeline; GPipe's and interleaved ones have more.
        schedule: Schedule = "1f1b" if self.virtual == 1 else "planned"
        return replace(self, buckets=buckets, schedule=schedule, **_UNKNOWN)

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
            lines.append(f"  bucket {i}: {hybrid} in {bucket.micro_batches} micro-batch(es){cut}")
        return "\n".join(lines)


_ADAPTER: TypeAdapter[Plan] = TypeAdapter(Plan)

_UNKNOWN: dict[str, Any] = {
    "template": (),
    "predicted_latency_s": None,
    "alternatives": {},
    "memory_bytes": (),
    "padding": {},
}
"""What was predicted for all tasks of a plan says nothing once they are others."""


def _described(problems: Sequence[Any]) -> list[str]:
    """A sentence for each wrong entry; what encloses a wrong entry is wrong for its sake only."""
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
    """The plan that a policy means.

    Args:
        policy: `serial` (the first task alone), `temporal` or `spatial`.
        accumulation: Active tasks in order, with their `gradient_accumulation_steps`.
        stages: Pipeline stages.
        micro_batches: Per bucket; by default the largest accumulation, and at least twice the stages of a pipeline
            in `spatial`, so that its bubble stays below a third.
        chunk: Tokens of a chunk; None: packs are not cut.
        alignment: See `Plan`.

    Returns:
        The plan; it has no bucket when no task is active.
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


def dumps(plan: Plan) -> str:
    """The text of `plan.json`."""
    return json.dumps(plan.to_json(), indent=2) + "\n"
