"""What hybrid tasks cost on each stage, and what a pipeline of them takes (MuxTune section 3.3).

Where the costs come from is behind `CostModel`: measured, interpolated, or made up by a test.
Shapes: S stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_mux.pipeline.bucket import BucketCost

Hybrid = tuple[int, ...]
"""A hybrid task: indices of its tasks, ascending."""


@dataclass(frozen=True)
class HybridCost:
    """One micro-batch of a hybrid task (equation 3, and the activations of equation 5).

    Attributes:
        forward: `[S]` seconds of a stage's forward pass.
        backward: `[S]` seconds of its backward pass.
        exposed: `[S]` seconds of communication in either pass that nothing hides when the hybrid task has a bucket to
            itself; empty: none. (The paper takes all communication for overlapped.)
        memory: `[S]` bytes kept between the two; empty: not counted.
        working: `[S]` bytes that a stage takes besides while it computes the micro-batch; empty: not counted.
        transfer: `[S - 1]` seconds between stages; empty: none.
        parts: How many micro-batches there are of it on a pipeline, where sequences are too few for as many as were
            asked for; 0: as many as were asked for.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    exposed: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    working: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    parts: int = 0

    def count(self, micro_batches: int) -> int:
        """How many micro-batches there are if `micro_batches` are asked for."""
        return min(micro_batches, self.parts) if self.parts else micro_batches

    def alone(self) -> tuple[float, ...]:
        """`[S]` seconds of both passes with a bucket to itself."""
        exposed = self.exposed or (0.0,) * len(self.forward)
        return tuple(f + b + 2 * e for f, b, e in zip(self.forward, self.backward, exposed, strict=True))


class CostModel(Protocol):
    """Tells what hybrid tasks cost."""

    def hybrid(self, tasks: Hybrid, micro_batches: int) -> HybridCost:
        """One of `micro_batches` equal parts of a step of `tasks` together."""
        ...

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """The same of many hybrid tasks: the planner asks for thousands."""
        ...


def pipeline_latency(cost: HybridCost, micro_batches: int) -> float:
    """Seconds of a step of one hybrid task in a pipeline of its own (equation 4).

    The first S - 1 stages once for warm-up and drain, then the slowest stage for every micro-batch. Forward and
    backward are counted as they are instead of as twice the forward.
    """
    passes = cost.alone()
    return sum(passes[:-1]) + cost.count(micro_batches) * max(passes)


def bucket_cost(costs: Sequence[HybridCost], micro_batches: int) -> BucketCost:
    """Hybrid tasks interleaved in one clock: their compute adds up, their communication hides behind each other's."""
    stages = len(costs[0].forward)
    working = [cost.working for cost in costs if cost.working]
    exposed = costs[0].exposed if len(costs) == 1 and costs[0].exposed else (0.0,) * stages
    return BucketCost(
        micro_batches=max(cost.count(micro_batches) for cost in costs),
        forward=tuple(sum(c.forward[s] for c in costs) + exposed[s] for s in range(stages)),
        backward=tuple(sum(c.backward[s] for c in costs) + exposed[s] for s in range(stages)),
        memory=_sum(costs, "memory", stages),
        # Computed one after the other.
        working=tuple(map(max, zip(*working, strict=True))) if working else (),
        transfer=_sum(costs, "transfer", stages - 1),
    )


def _sum(costs: Sequence[HybridCost], name: str, length: int) -> tuple[float, ...]:
    rows = [getattr(cost, name) for cost in costs if getattr(cost, name)]
    return tuple(sum(row[i] for row in rows) for i in range(length)) if rows else ()


def fits(bucket: BucketCost, memory_limit: Sequence[float] | None) -> bool:
    """Whether one micro-batch of the bucket fits into every stage's memory (equation 5 is for what is in flight)."""
    if memory_limit is None:
        return True
    return all(
        bucket.kept(s) * bucket.chunks + bucket.works_with(s) <= limit for s, limit in enumerate(memory_limit)
    )


def kept_limit(buckets: Sequence[BucketCost], rank_limit: Sequence[float]) -> list[float] | None:
    """What each rank may keep of micro-batches while it computes any of these buckets; None: one of them does not fit.

    Args:
        buckets: Of a step.
        rank_limit: Bytes that each rank may take for passes.
    """
    ranks = len(rank_limit)
    left = [limit - works_with(buckets, rank, ranks) for rank, limit in enumerate(rank_limit)]
    for bucket in buckets:
        kept = [sum(bucket.kept(s) for s in range(rank, bucket.stages, ranks)) for rank in range(ranks)]
        if any(own * bucket.chunks > most for own, most in zip(kept, left, strict=True)):
            return None
    return left


def works_with(buckets: Sequence[BucketCost], rank: int, ranks: int) -> float:
    """The most bytes that one of so many ranks takes while it computes a chunk of any of these buckets."""
    stages = range(rank, buckets[0].stages, ranks) if buckets else ()
    return max((bucket.works_with(stage) for bucket in buckets for stage in stages), default=0.0)


def lower_bound(buckets: Sequence[BucketCost]) -> float:
    """Seconds that no order of these buckets' micro-batches can beat.

    Every stage does its own work; before its first forward some micro-batch has passed the stages before it, and after
    its last backward some micro-batch's gradient has still to go back through them.
    """
    stages = buckets[0].stages
    best, ahead, behind = 0.0, [0.0] * len(buckets), [0.0] * len(buckets)
    for stage in range(stages):
        work = math.fsum(b.micro_batches * (b.forward[stage] + b.backward[stage]) for b in buckets)
        best = max(best, min(ahead) + work + min(behind))
        if stage < stages - 1:
            ahead = [t + b.forward[stage] + b.to_next(stage) for t, b in zip(ahead, buckets, strict=True)]
            behind = [t + b.backward[stage] + b.to_next(stage) for t, b in zip(behind, buckets, strict=True)]
    return best
