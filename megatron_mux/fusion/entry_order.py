"""The published latency of a step, and the orders in which buckets may enter the pipeline to lower it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_mux.pipeline.bucket import BucketCost, Sizes
from megatron_mux.pipeline.structured import descending

BUSY_ENOUGH = 1.002
"""Latency over the busiest rank's work below which no other entry order is tried: there is hardly anything to gain."""


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
    counts = [sum(own) for own in sizes]
    return max(
        math.fsum(
            count * (bucket.forward[s] + bucket.backward[s])
            for bucket, count in zip(buckets, counts, strict=True)
            for s in range(rank, bucket.stages, ranks)
        )
        for rank in range(ranks)
    )


def simulated_steps(steps: int) -> tuple[int, ...]:
    """Numbers of steps to simulate for `seconds_per_step`, where a flush comes every `steps` steps."""
    return (1,) if steps == 1 else (1, min(steps, 3))


def seconds_per_step(latencies: Sequence[float], work: float, steps: int) -> float:
    """Seconds of a step, averaged over the steps between two flushes: what plans are compared and published by.

    Args:
        latencies: Seconds of as many steps, without a flush between them, as `simulated_steps` says.
        work: Seconds of work that a step has on the busiest rank: each further step adds at least that.
        steps: Steps between two flushes.
    """
    if steps == 1:
        return latencies[0]
    simulated = simulated_steps(steps)[-1]
    further = max(work, (latencies[1] - latencies[0]) / (simulated - 1))
    return (latencies[1] + (steps - simulated) * further) / steps
