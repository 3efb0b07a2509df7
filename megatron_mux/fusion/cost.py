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
        forward: `[S]` seconds of computation in a stage's forward pass.
        backward: `[S]` seconds of computation in its backward pass.
        communication_forward: `[S]` seconds of communication in the forward pass that only the computation of other
            hybrid tasks in the same clock can hide; empty: none. (The paper takes all communication as hidden.)
        communication_backward: `[S]` the same in the backward pass.
        memory: `[S]` bytes kept between the two passes; empty: not counted.
        working: `[S]` further bytes in use while a stage computes the micro-batch; empty: not counted.
        transfer: `[S - 1]` seconds between stages; empty: none.
        parts: Number of micro-batches on a pipeline, where the sequences are too few for the number asked for; 0: that
            number.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    communication_forward: tuple[float, ...] = ()
    communication_backward: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    working: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    parts: int = 0

    def count(self, micro_batches: int) -> int:
        """Number of micro-batches if `micro_batches` are asked for."""
        return min(micro_batches, self.parts) if self.parts else micro_batches

    @property
    def communicates(self) -> bool:
        """Whether its passes have any communication."""
        return any(self.communication_forward) or any(self.communication_backward)

    def communication(self, stage: int) -> float:
        """Seconds of communication of both passes on a stage."""
        return sum(own[stage] for own in (self.communication_forward, self.communication_backward) if own)

    def alone(self) -> tuple[float, ...]:
        """`[S]` seconds of both passes with a bucket to itself."""
        passes = zip(self.forward, self.backward, strict=True)
        return tuple(f + b + self.communication(stage) for stage, (f, b) in enumerate(passes))


class CostModel(Protocol):
    """Predicts the cost of hybrid tasks."""

    def hybrid(self, tasks: Hybrid, micro_batches: int) -> HybridCost:
        """One of `micro_batches` equal parts of a step of `tasks` together."""
        ...

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """The same for many hybrid tasks: the planner asks for thousands."""
        ...


def pipeline_latency(cost: HybridCost, micro_batches: int) -> float:
    """Seconds of a step of one hybrid task in a pipeline of its own (equation 4).

    The first S - 1 stages once for warm-up and drain, then the slowest stage for every micro-batch. Forward and
    backward are counted as they are instead of as twice the forward.
    """
    passes = cost.alone()
    return sum(passes[:-1]) + cost.count(micro_batches) * max(passes)


def bucket_cost(costs: Sequence[HybridCost], micro_batches: int) -> BucketCost:
    """Hybrid tasks interleaved in one clock: each one's communication hides behind the computation of the others."""
    stages = range(len(costs[0].forward))
    working = [cost.working for cost in costs if cost.working]
    return BucketCost(
        micro_batches=max(cost.count(micro_batches) for cost in costs),
        forward=tuple(_clock([(c.forward, c.communication_forward) for c in costs], s) for s in stages),
        backward=tuple(_clock([(c.backward, c.communication_backward) for c in costs], s) for s in stages),
        memory=_sum(costs, "memory", len(stages)),
        # Computed one after the other.
        working=tuple(map(max, zip(*working, strict=True))) if working else (),
        transfer=_sum(costs, "transfer", len(stages) - 1),
    )


def _clock(passes: Sequence[tuple[Sequence[float], Sequence[float]]], stage: int) -> float:
    """Seconds of several hybrid tasks' passes in one clock.

    The stage computes one at a time, the link carries one at a time, and a pass cannot overlap with itself: the longest
    of these three.
    """
    computation = sum(compute[stage] for compute, _ in passes)
    if not any(messages for _, messages in passes):
        return computation
    link = sum(messages[stage] for _, messages in passes if messages)
    longest = max(compute[stage] + (messages[stage] if messages else 0.0) for compute, messages in passes)
    return max(computation, link, longest)


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


def lower_bound(buckets: Sequence[BucketCost], steps: int = 1) -> float:
    """Seconds of a step that no order of these buckets' micro-batches can beat, over so many steps without a flush.

    Every stage does its own work; before its first forward some micro-batch has passed the stages before it, and after
    its last backward some micro-batch's gradient has still to go back through them.
    """
    stages = buckets[0].stages
    best, ahead, behind = 0.0, [0.0] * len(buckets), [0.0] * len(buckets)
    for stage in range(stages):
        work = math.fsum(b.micro_batches * (b.forward[stage] + b.backward[stage]) for b in buckets)
        best = max(best, work + (min(ahead) + min(behind)) / steps)
        if stage < stages - 1:
            ahead = [t + b.forward[stage] + b.to_next(stage) for t, b in zip(ahead, buckets, strict=True)]
            behind = [t + b.backward[stage] + b.to_next(stage) for t, b in zip(behind, buckets, strict=True)]
    return best
