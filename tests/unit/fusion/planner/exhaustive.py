"""What the planner's search is compared with: every arrangement there is, and the paper's surrogates alone."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import permutations

from megatron_mux.fusion.planner.arrangement import Arrangement, ArrangementEvaluator
from megatron_mux.fusion.planner.cost import CostModel
from megatron_mux.fusion.planner.grouping import Grouping, Partition, consecutive


def every_partition(tasks: Sequence[int]) -> Iterator[Partition]:
    """All partitions of the tasks, consecutive or not: 4,140 of eight tasks."""
    if not tasks:
        yield ()
        return
    *others, last = tasks
    for partition in every_partition(others):
        for i, hybrid in enumerate(partition):
            yield (*partition[:i], (*hybrid, last), *partition[i + 1 :])
        yield (*partition, (last,))


def every_grouping(count: int) -> Iterator[Grouping]:
    """All groupings of `count` hybrid tasks into any number of buckets."""
    if count == 0:
        yield ()
        return
    for grouping in every_grouping(count - 1):
        for i, bucket in enumerate(grouping):
            yield (*grouping[:i], (*bucket, count - 1), *grouping[i + 1 :])
        yield (*grouping, (count - 1,))


def exhaustive(
    model: CostModel,
    tasks: int,
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
    steps: int = 1,
    below: float = math.inf,
    tolerance: float = 0.0,
) -> Arrangement | None:
    """The best of all partitions, all groupings into buckets and all entry orders. For up to six tasks.

    Args:
        model: Costs.
        tasks: Number of tasks.
        micro_batches: Values of C to try.
        memory_limit: As for `search`.
        steps: As for `search`.
        below: A latency that is known to be reachable: only what is faster is looked for.
        tolerance: Stop where nothing can be faster than the best found by more than this share of it.

    Returns:
        The best arrangement; None if none is faster than `below`.
    """
    evaluator = ArrangementEvaluator(model, memory_limit, steps=steps)
    partitions = list(every_partition(range(tasks)))
    candidates = [
        (least, count, partition)
        for count in micro_batches
        for least, partition in zip(evaluator.least(partitions, count), partitions, strict=True)
    ]
    heapq.heapify(candidates)
    best: Arrangement | None = None
    below *= 1 - tolerance
    while candidates and candidates[0][0] < below:
        _, count, partition = heapq.heappop(candidates)
        for grouping in every_grouping(len(partition)):
            grouped = tuple(tuple(partition[i] for i in bucket) for bucket in grouping)
            if evaluator.bound(grouped, count) >= below:
                continue
            for order in permutations(grouped):
                found = evaluator.latency(order, count, below)
                if found is not None:
                    best, below = found, found.latency * (1 - tolerance)
    return best


def plain_equation_6(
    model: CostModel,
    tokens: Sequence[float],
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
    steps: int = 1,
) -> Arrangement:
    """The partition of least F, whatever pipeline it makes: what the paper's surrogate alone finds. It has to fit."""
    evaluator = ArrangementEvaluator(model, memory_limit, steps=steps)
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    _, count, partition = min(
        (value, count, partition)
        for count in micro_batches
        for value, partition in consecutive(evaluator, order, count, memory_limit)
    )
    groupings = [g for g in evaluator.groupings(partition, count) if evaluator.bound(g, count) < math.inf]
    found = [evaluator.latency(evaluator.orders(g, count)[0], count) for g in groupings]
    return min((own for own in found if own is not None), key=lambda own: own.latency)


def imbalance(latencies: Sequence[float], grouping: Grouping) -> float:
    """Equation 7's sum: squared differences of the buckets' first-stage latencies from their mean, in s^2."""
    sums = [sum(latencies[i] for i in bucket) for bucket in grouping]
    mean = sum(sums) / len(sums)
    return sum((value - mean) ** 2 for value in sums)
