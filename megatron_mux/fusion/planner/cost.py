"""What hybrid tasks cost on each stage, and what a pipeline of them takes (MuxTune section 3.3).

Where the costs come from is behind `CostModel`: measured, interpolated, or made up by a test.
Shapes: S stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megatron_mux.fusion.graphs.launch_order import LayerCost, Overlap, PassCost
from megatron_mux.pipeline.bucket import BucketCost, Sizes
from megatron_mux.pipeline.structured import descending

_ROUNDING = 1e-12
"""Relative difference of sums of the same seconds in another order."""

BUSY_ENOUGH = 1.002
"""Latency over its bound below which no other entry order is tried: there is hardly anything to gain."""

Hybrid = tuple[int, ...]
"""A hybrid task: indices of its tasks, ascending."""


@dataclass(frozen=True)
class HybridCost(BucketCost):
    """One hybrid task (equation 3, and the activations of equation 5), without the communication in its passes.

    Attributes:
        communication_forward: `[S]` seconds of communication in the forward pass that only the computation of other
            hybrid tasks in the same clock can hide; empty: none. (The paper takes all communication as hidden.)
        communication_backward: `[S]` the same in the backward pass.
        overlap: How it is hidden; None: as well as computation and link allow.
        kinds: With an overlap, for the forward and the backward pass: see `PassCost`.
        outside: With an overlap, `[2, S]` seconds of embedding and loss head in the forward and the backward pass.
    """

    communication_forward: tuple[float, ...] = ()
    communication_backward: tuple[float, ...] = ()
    overlap: Overlap | None = None
    kinds: tuple[tuple[LayerCost, ...], tuple[LayerCost, ...]] = ((), ())
    outside: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())

    @property
    def communicates(self) -> bool:
        """Whether its passes have any communication."""
        return any(self.communication_forward) or any(self.communication_backward)

    @property
    def gains_by_company(self) -> bool:
        """Whether other hybrid tasks in the same bucket can hide its communication."""
        return self.communicates and (self.overlap is None or self.overlap.interleave != "halves")

    def pass_cost(self, stage: int, backward: bool) -> PassCost:
        """A pass through a stage, for its launch order."""
        seconds = self.backward if backward else self.forward
        messages = self.communication_backward if backward else self.communication_forward
        outside = self.outside[backward][stage]
        return PassCost(max(0.0, seconds[stage] - outside), messages[stage], self.kinds[backward], outside)

    def alone(self) -> tuple[float, ...]:
        """`[S]` seconds of both passes with a bucket to itself."""
        both = (self.forward, self.backward, self.communication_forward, self.communication_backward)
        return tuple(map(sum, zip(*filter(None, both), strict=True)))


class CostModel(Protocol):
    """Predicts the cost of hybrid tasks."""

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """A step of each of these sets of tasks, in `micro_batches` equal parts or as many as there are sequences."""
        ...


def pipeline_latency(cost: HybridCost) -> float:
    """Seconds of a step of one hybrid task in a pipeline of its own (equation 4).

    The first S - 1 stages once for warm-up and drain, then the slowest stage for every micro-batch. Forward and
    backward are counted as they are instead of as twice the forward.
    """
    passes = cost.alone()
    return sum(passes[:-1]) + cost.micro_batches * max(passes)


def bucket_cost(costs: Sequence[HybridCost]) -> BucketCost:
    """Hybrid tasks interleaved in one clock: each one's communication hides behind the computation of the others."""
    if len(costs) == 1 and not costs[0].communicates:
        return costs[0]
    stages, together = range(costs[0].stages), max if costs[0].overlap is None else sum
    return BucketCost(
        micro_batches=max(cost.micro_batches for cost in costs),
        forward=tuple(_clock(costs, s, backward=False) for s in stages),
        backward=tuple(_clock(costs, s, backward=True) for s in stages),
        memory=tuple(sum(c.memory[s] for c in costs) for s in stages),
        # What is interleaved is in the middle together.
        working=tuple(together(c.working[s] for c in costs) for s in stages),
        transfer=tuple(sum(c.transfer[s] for c in costs) for s in stages[:-1]),
    )


def _clock(costs: Sequence[HybridCost], stage: int, backward: bool) -> float:
    """Seconds of several hybrid tasks' passes in one clock, as their launch order leads to.

    Without one: the stage computes one at a time, the link carries one at a time, and a pass cannot overlap with
    itself; the longest of these three.
    """
    overlap = costs[0].overlap
    if overlap is not None:
        return overlap.seconds([cost.pass_cost(stage, backward) for cost in costs], stage)
    compute = [(cost.backward if backward else cost.forward)[stage] for cost in costs]
    messages = [cost.communication_backward if backward else cost.communication_forward for cost in costs]
    sent = [m[stage] if m else 0.0 for m in messages]
    return max(sum(compute), sum(sent), *map(sum, zip(compute, sent, strict=True)))


def fits(bucket: BucketCost, memory_limit: Sequence[float] | None) -> bool:
    """Whether one micro-batch of the bucket fits into every stage's memory (equation 5 is for what is in flight)."""
    if memory_limit is None:
        return True
    return all(
        bucket.memory[s] * bucket.chunks + bucket.working[s] <= limit for s, limit in enumerate(memory_limit)
    )


def kept_limit(buckets: Sequence[BucketCost], rank_limit: Sequence[float]) -> list[float]:
    """What each rank may keep of several micro-batches while it computes any of these buckets.

    A micro-batch that keeps more is in flight alone, so only its own working memory comes on top: see `StructuredRun`.

    Args:
        buckets: Of a step.
        rank_limit: Bytes that each rank may take for passes.
    """
    ranks = len(rank_limit)
    works = [max(max(bucket.working[rank::ranks]) for bucket in buckets) for rank in range(ranks)]
    return [max(0.0, limit - size) for limit, size in zip(rank_limit, works, strict=True)]


def lower_bounds(sets: Sequence[Sequence[BucketCost]], steps: int = 1, virtual: int = 1) -> list[float]:
    """For each set of buckets, seconds of a step that no order of their micro-batches can beat, over so many steps
    without a flush.

    Every rank does its own work; before its first forward some micro-batch has passed the stages before it, and after
    its last backward some micro-batch's gradient has still to go back through them. And a bucket's step takes as long
    as it does alone, since its next one waits for it: the way of a micro-batch there and back, and for each further one
    the longest pass; or what a rank does, and the way there and back. There are `virtual` stages to a rank.
    """
    distinct = {id(bucket): bucket for buckets in sets for bucket in buckets}
    index = {key: i for i, key in enumerate(distinct)}
    counts = np.array([[bucket.micro_batches] for bucket in distinct.values()])  # [N, 1]
    passes = np.array([(bucket.forward, bucket.backward) for bucket in distinct.values()])  # [N, 2, S]
    ranks = passes.shape[2] // virtual
    work = counts * passes.reshape(len(counts), 2 * virtual, ranks).sum(axis=1)
    way = passes.copy()
    way[:, :, :-1] += np.array([[bucket.transfer] for bucket in distinct.values()])
    before = (way.cumsum(axis=2) - way)[:, :, :ranks]
    further = (counts[:, 0] - 1) * passes.max(axis=(1, 2))
    alone = np.maximum(way.sum(axis=(1, 2)) + further, (before.sum(axis=1) + work).max(axis=1))
    at = [index[id(bucket)] for buckets in sets for bucket in buckets]
    starts = np.cumsum([0, *map(len, sets[:-1])])
    fill = np.minimum.reduceat(before[at], starts).sum(axis=1)
    together = (np.add.reduceat(work[at], starts) + fill / steps).max(axis=1)
    bounds = np.maximum(together, np.maximum.reduceat(alone[at], starts))
    return [float(seconds) * (1 - _ROUNDING) for seconds in bounds]


def entry_orders(buckets: Sequence[BucketCost]) -> list[list[int]]:
    """Orders worth trying, by first-stage latency: descending (MuxTune's rule 1), ascending, large and small in turn.

    Where steps follow each other without a flush, the large bucket that begins a step no longer fills the pipeline
    for the small ones at its end: other orders may be faster.
    """
    down = descending(buckets)
    if buckets[0].stages == 1:
        return [down]  # one stage is never idle
    pairs = zip(down, reversed(down), strict=True)
    alternating = list(dict.fromkeys(i for pair in pairs for i in pair))
    return [list(order) for order in dict.fromkeys(map(tuple, (down, down[::-1], alternating)))]


def busiest(buckets: Sequence[BucketCost], sizes: Sizes, ranks: int) -> float:
    """Seconds of work that a step of these sizes has on the busiest rank."""
    counts = [sum(chunks) for chunks in sizes]
    return max(
        math.fsum(
            count * (bucket.forward[s] + bucket.backward[s])
            for bucket, count in zip(buckets, counts, strict=True)
            for s in range(rank, bucket.stages, ranks)
        )
        for rank in range(ranks)
    )


def seconds_per_step(
    simulated: Callable[[int], float], work: float, steps: int, below: float = math.inf
) -> float | None:
    """Seconds of a step, averaged over the steps between two flushes: what plans are compared and published by.

    Args:
        simulated: Seconds of so many steps, without a flush between them.
        work: Seconds of work that a step has on the busiest rank: each further step adds at least that.
        steps: Steps between two flushes; at most three of them are simulated.
        below: What is not faster need not be known: None is returned then.
    """
    count = min(steps, 3)
    seconds = simulated(count)
    if (seconds + (steps - count) * work) / steps >= below:
        return None
    if steps > 1:
        further = max(work, (seconds - simulated(1)) / (count - 1))
        seconds = (seconds + (steps - count) * further) / steps
    return seconds if seconds < below else None
