"""Changes to a plan between two steps: tasks leave, tasks join, a bucket gets smaller. The rest of the plan stays."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_mux.fusion.plan import Bucket, HybridTask, Plan, Schedule


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
            buckets.append(replace(bucket, hybrid_tasks=tuple(hybrids), chunks=()))
    return _changed(plan, buckets)


def add_tasks(plan: Plan, names: Sequence[str], micro_batches: int) -> Plan:
    """The plan with a new last bucket: one hybrid task of those `names` that the plan lacks."""
    new = tuple(sorted(set(names) - set(plan.tasks)))
    if not new:
        return plan
    # Its costs are unknown, so the template assumes equal passes: few micro-batches are in flight at once.
    return _changed(plan, (*plan.buckets, Bucket((HybridTask(new),), micro_batches)))


def shrink_bucket(plan: Plan, index: int, sequences: Mapping[str, int]) -> Plan | None:
    """The plan with less of a bucket in memory at a time; None if the bucket already computes single sequences.

    Args:
        plan: The plan.
        index: The bucket: it is cut into twice as many micro-batches or, once those hold one sequence, into its tasks.
        sequences: Number of sequences in a step of each task.
    """
    bucket = plan.buckets[index]

    def most(tasks: Sequence[str]) -> int:
        return math.ceil(sum(sequences[name] for name in tasks) / plan.data)

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
