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
from collections.abc import Iterator, Sequence

from megatron_mux.fusion.cost import CostModel, Hybrid, fits, pipeline_latency

Partition = tuple[Hybrid, ...]
"""Hybrid tasks that cover every task once."""

Grouping = tuple[tuple[int, ...], ...]
"""Indices of the hybrid tasks of each bucket."""


def consecutive(
    model: CostModel, order: Sequence[int], micro_batches: int, memory_limit: Sequence[float] | None = None
) -> list[tuple[float, Partition]]:
    """The best partitions into runs of neighbours in `order`, for each number of hybrid tasks (equation 6).

    Args:
        model: Costs.
        order: Task indices sorted by tokens.
        micro_batches: C, the same for all.
        memory_limit: `[S]` bytes; a hybrid task whose micro-batch does not fit is not built.

    Returns:
        `(F, hybrid tasks)` by their number, those that do not fit left out.
    """
    count = len(order)
    first, further = _tables(model, order, micro_batches, memory_limit)
    best = [[math.inf] * (count + 1) for _ in range(count + 1)]  # best[n][m]
    cut = [[0] * (count + 1) for _ in range(count + 1)]
    best[1][1:] = first[1:]
    for n in range(2, count + 1):
        for m in range(n, count + 1):
            for i in range(n - 1, m):
                value = best[n - 1][i] + further[i][m]
                if value < best[n][m]:
                    best[n][m], cut[n][m] = value, i
    found = []
    for n in range(1, count + 1):
        if best[n][count] < math.inf:
            found.append((best[n][count], _partition(order, cut, n)))
    return found


def _tables(
    model: CostModel, order: Sequence[int], micro_batches: int, memory_limit: Sequence[float] | None
) -> tuple[list[float], list[list[float]]]:
    """Equation 4 of the first m tasks; what tasks i+1..m add to a running pipeline. Infinite: does not fit."""
    count = len(order)
    first = [math.inf] * (count + 1)
    further = [[math.inf] * (count + 1) for _ in range(count + 1)]
    runs = [(i, m) for i in range(count) for m in range(i + 1, count + 1)]
    costs = model.hybrids([tuple(sorted(order[i:m])) for i, m in runs], micro_batches)
    for (i, m), cost in zip(runs, costs, strict=True):
        if memory_limit is not None and not fits(cost, memory_limit):
            continue
        further[i][m] = cost.micro_batches * max(cost.alone())
        if i == 0:
            first[m] = pipeline_latency(cost)
    return first, further


def _partition(order: Sequence[int], cut: Sequence[Sequence[int]], number: int) -> Partition:
    hybrids: list[Hybrid] = []
    stop = len(order)
    for n in range(number, 0, -1):
        start = cut[n][stop] if n > 1 else 0
        hybrids.append(tuple(sorted(order[start:stop])))
        stop = start
    return tuple(sorted(hybrids))


def balanced(latencies: Sequence[float], buckets: int) -> Grouping:
    """A grouping into exactly `buckets` buckets whose first-stage latencies hardly differ (equation 7).

    Longest first, each to the bucket with the least so far; then single moves and swaps for as long as one of them
    lowers equation 7's sum. Deterministic.

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
    _improve(latencies, members)
    return tuple(sorted(tuple(sorted(bucket)) for bucket in members))


def _improve(latencies: Sequence[float], members: list[list[int]]) -> None:
    sums = [sum(latencies[i] for i in bucket) for bucket in members]
    tolerance = 1e-12 * max(sum(sums), 1e-300) ** 2
    while True:
        best, change = -tolerance, None
        for a in range(len(members)):
            for b in range(len(members)):
                if a == b:
                    continue
                for gain, give, take in _changes(latencies, members[a], members[b], sums[a] - sums[b]):
                    if gain < best:
                        best, change = gain, (a, b, give, take)
        if change is None:
            return
        a, b, give, take = change
        members[a].remove(give)
        members[b].append(give)
        if take is not None:
            members[b].remove(take)
            members[a].append(take)
        for bucket in (a, b):
            sums[bucket] = sum(latencies[i] for i in members[bucket])


def _changes(
    latencies: Sequence[float], here: Sequence[int], there: Sequence[int], surplus: float
) -> Iterator[tuple[float, int, int | None]]:
    """What giving one hybrid task, or exchanging two, does to the sum of squares: `(change, given, taken)`.

    With d moved from a bucket to another, the squares change by 2 d (d - surplus).
    """
    for give in here:
        if len(here) > 1:
            moved = latencies[give]
            yield 2 * moved * (moved - surplus), give, None
        for take in there:
            moved = latencies[give] - latencies[take]
            if moved > 0:
                yield 2 * moved * (moved - surplus), give, take


def every_grouping(count: int) -> Iterator[Grouping]:
    """All groupings of `count` hybrid tasks into any number of buckets, for comparison."""
    if count == 0:
        yield ()
        return
    for grouping in every_grouping(count - 1):
        for i, bucket in enumerate(grouping):
            yield (*grouping[:i], (*bucket, count - 1), *grouping[i + 1 :])
        yield (*grouping, (count - 1,))
