"""Which hybrid tasks share a bucket: balanced first-stage latencies for a given number of buckets (equation 7)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

Grouping = tuple[tuple[int, ...], ...]
"""Indices of the hybrid tasks of each bucket."""


def imbalance(latencies: Sequence[float], grouping: Grouping) -> float:
    """Equation 7's sum: squared differences of the buckets' first-stage latencies from their mean, in s^2."""
    sums = [sum(latencies[i] for i in bucket) for bucket in grouping]
    mean = sum(sums) / len(sums)
    return sum((value - mean) ** 2 for value in sums)


def balanced(latencies: Sequence[float], buckets: int) -> Grouping:
    """A grouping into exactly `buckets` buckets whose first-stage latencies hardly differ.

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
