"""The plan: which tasks are batched, which are interleaved, in how many micro-batches. Data, nothing else.

Until the planner exists a plan follows from the policy alone: `spatial` puts all active tasks into one hybrid
task (MuxTune section 3.3, batching), `temporal` gives each task a bucket of its own (interleaving), `serial` is
`temporal` for one task at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Policy = Literal["serial", "temporal", "spatial"]


@dataclass(frozen=True)
class HybridTask:
    """Tasks batched together in space.

    Attributes:
        tasks: Their names, in row order.
    """

    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Bucket:
    """Hybrid tasks that share pipeline clocks.

    Attributes:
        hybrid_tasks: One for now.
        micro_batches: In how many micro-batches one step of the bucket is computed on each pipeline.
    """

    hybrid_tasks: tuple[HybridTask, ...]
    micro_batches: int

    @property
    def tasks(self) -> tuple[str, ...]:
        """All task names of the bucket."""
        return tuple(name for hybrid in self.hybrid_tasks for name in hybrid.tasks)


@dataclass(frozen=True)
class Plan:
    """What every rank computes in one step.

    Attributes:
        policy: Where it comes from.
        stages: Pipeline stages.
        buckets: In the order they enter the pipeline.
    """

    policy: Policy
    stages: int
    buckets: tuple[Bucket, ...]

    @property
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
            KeyError, TypeError: `value` is not a plan.
        """
        buckets = tuple(
            Bucket(tuple(HybridTask(tuple(h["tasks"])) for h in b["hybrid_tasks"]), int(b["micro_batches"]))
            for b in value["buckets"]
        )
        return cls(value["policy"], int(value["stages"]), buckets)

    def __str__(self) -> str:
        lines = [f"plan: {self.policy}, {self.stages} stage{'s' if self.stages > 1 else ''}"]
        for i, bucket in enumerate(self.buckets):
            hybrid = " | ".join(" + ".join(h.tasks) for h in bucket.hybrid_tasks)
            lines.append(f"  bucket {i}: {hybrid} in {bucket.micro_batches} micro-batch(es)")
        return "\n".join(lines)


def plan_for(
    policy: Policy, accumulation: Mapping[str, int], stages: int, micro_batches: int | None = None
) -> Plan:
    """The plan that a policy means.

    Args:
        policy: `serial` (the first task alone), `temporal` or `spatial`.
        accumulation: Active tasks in order, with their `gradient_accumulation_steps`.
        stages: Pipeline stages.
        micro_batches: Per bucket; by default the largest accumulation, and at least twice the stages of a pipeline
            in `spatial`, so that its bubble stays below a third.

    Returns:
        The plan; it has no bucket when no task is active.
    """

    def bucket(tasks: Sequence[str], fill: bool) -> Bucket:
        least = 2 * stages if fill and stages > 1 else 1
        count = micro_batches or max(least, *(accumulation[name] for name in tasks))
        return Bucket((HybridTask(tuple(tasks)),), count)

    names = list(accumulation)
    if policy == "serial":
        names = names[:1]
    if not names:
        return Plan(policy, stages, ())
    if policy == "spatial":
        return Plan(policy, stages, (bucket(names, fill=True),))
    # With several buckets in the pipeline at once, the other tasks fill the bubble.
    return Plan(policy, stages, tuple(bucket([name], fill=len(names) == 1) for name in names))


def dumps(plan: Plan) -> str:
    """The text of `plan.json`."""
    return json.dumps(plan.to_json(), indent=2) + "\n"
