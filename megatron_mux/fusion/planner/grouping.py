"""Which tasks to batch, and which hybrid tasks share a bucket: MuxTune's equations 6 and 7.

Equation 6 as printed adds `L(H) / S` for a hybrid task, its whole latency by equation 4 averaged over stages. That
counts a warm-up for each of them and is too little for the C micro-batches that each puts through the slowest stage. In
a pipeline that is not flushed between hybrid tasks there is one warm-up and one drain, and every further hybrid task
prolongs the steady phase by C passes, forward and backward, of its slowest stage. So here

    F(m, 1) = L(H[1..m])                                             equation 4
    F(m, n) = min over i of F(i, n - 1) + C max_s L_s(H[i+1..m])     n - 1 <= i < m

with `L_s` both passes of one micro-batch on stage s.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.planner.cost import CostModel, Hybrid, fits, pipeline_latency

Partition = tuple[Hybrid, ...]
"""Hybrid tasks that cover every task once."""

Grouping = tuple[tuple[int, ...], ...]
"""Indices of the hybrid tasks of each bucket."""


_MOST_RUNS = 1024
"""Runs of neighbours that are priced, about: all of them up to 44 tasks; of more tasks fewer for each."""

_EVERY_NUMBER = 16
"""Up to so many hybrid tasks every number of them is looked at; beyond, each is an eighth more than the one before."""


def consecutive(
    model: CostModel, order: Sequence[int], micro_batches: int, memory_limit: Sequence[float] | None = None
) -> list[tuple[float, Partition]]:
    """The best partitions into runs of neighbours in `order`, by number of hybrid tasks (equation 6).

    Args:
        order: Task indices sorted by tokens.
        micro_batches: C, the same for all.
        memory_limit: `[S]` bytes; a hybrid task whose micro-batch does not fit is not built.

    Returns:
        `(F, hybrid tasks)` by their number, see `numbers`; those that do not fit left out.
    """
    count = len(order)
    starts, stops = runs(count)
    costs = model.hybrids(
        [tuple(sorted(order[i:m])) for i, m in zip(starts, stops, strict=True)], micro_batches
    )
    first, further = np.full(count + 1, math.inf), np.full(len(starts), math.inf)
    for r, cost in enumerate(costs):
        if fits(cost, memory_limit):
            further[r] = cost.micro_batches * max(cost.alone())
            if starts[r] == 0:
                first[stops[r]] = pipeline_latency(cost)
    # The runs that end at task m are those from begins[m - 1] on.
    begins = np.searchsorted(stops, np.arange(1, count + 2))
    best = [np.full(count + 1, math.inf), first]
    for _ in range(2, count + 1):
        values = np.minimum.reduceat(best[-1][starts] + further, begins[:-1])
        best.append(np.concatenate([[math.inf], values]))
    partitions = []
    for n in numbers(count):
        if best[n][count] < math.inf:
            hybrids: list[Hybrid] = []
            stop = count
            for left in range(n, 0, -1):
                ending = slice(begins[stop - 1], begins[stop])
                start = 0
                if left > 1:
                    start = int(starts[ending][np.argmin(best[left - 1][starts[ending]] + further[ending])])
                hybrids.append(tuple(sorted(order[start:stop])))
                stop = start
            partitions.append((float(best[n][count]), tuple(sorted(hybrids))))
    return partitions


def runs(count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First tasks of runs, and one past the last, sorted by the latter.

    Of many tasks those of a band: runs of few begin anywhere, and with each doubling of their length half as many
    begin and end somewhere, so that there are a few for each task, of any length.
    """
    every = count * (count + 1) // 2 <= _MOST_RUNS
    band = count if every else max(1, _MOST_RUNS // (3 * count))
    bounds = set()
    step, shorter = 1, 0
    while shorter < count:
        longest = 2 * band * step
        for start in range(0, count, step):
            bounds |= {
                (start + n, start) for n in range(shorter + step, longest + 1, step) if start + n < count
            }
            if shorter < count - start <= longest:
                bounds.add((count, start))
        step, shorter = 2 * step, longest
    stops, starts = np.array(sorted(bounds)).T
    return starts, stops


def numbers(count: int) -> list[int]:
    """Numbers of parts to look at, of so many at most: the next is an eighth more where there are many."""
    sizes = [1]
    while sizes[-1] < count:
        sizes.append(min(count, sizes[-1] + max(1, sizes[-1] // 8 if sizes[-1] > _EVERY_NUMBER else 1)))
    return sizes


def balanced(latencies: Sequence[float], buckets: int) -> Grouping:
    """A grouping into exactly `buckets` buckets whose first-stage latencies hardly differ (equation 7).

    Longest first, each to the bucket with the least so far; the search moves hybrid tasks on, by the whole plan's
    latency. Deterministic.

    Args:
        latencies: First-stage seconds of each hybrid task.
        buckets: P, from 1 to their number.
    """
    order = sorted(range(len(latencies)), key=lambda i: (-latencies[i], i))
    members = [[i] for i in order[:buckets]]  # none may stay empty
    heap = [(latencies[i], bucket) for bucket, i in enumerate(order[:buckets])]
    heapq.heapify(heap)
    for i in order[buckets:]:
        total, bucket = heap[0]
        members[bucket].append(i)
        heapq.heapreplace(heap, (total + latencies[i], bucket))
    return tuple(sorted(tuple(sorted(bucket)) for bucket in members))
