"""Which tasks to batch: the dynamic programme of MuxTune's equation 6, and all partitions to compare it with.

Equation 6 as printed adds `L(H) / S` for a hybrid task, its whole latency by equation 4 averaged over stages. That
counts a warm-up for each of them and is too little for the C micro-batches that each puts through the slowest stage. In
a pipeline that is not flushed between hybrid tasks there is one warm-up and one drain, and every further hybrid task
prolongs the steady phase by C passes, forward and backward, of its slowest stage. So here

    F(m, 1) = L(H[1..m])                                             equation 4
    F(m, n) = min over i of F(i, n - 1) + C max_s L_s(H[i+1..m])     n - 1 <= i < m

with `L_s` both passes of one micro-batch on stage s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from megatron_mux.fusion.cost import CostModel, Hybrid, bucket_cost, fits, pipeline_latency

Partition = tuple[Hybrid, ...]
"""Hybrid tasks that cover every task once."""


def consecutive(
    model: CostModel, order: Sequence[int], micro_batches: int, memory_limit: Sequence[float] | None = None
) -> list[tuple[float, Partition]]:
    """The best partitions into runs of neighbours in `order`, for every number of hybrid tasks that is possible.

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
        if memory_limit is not None and not fits(bucket_cost([cost], micro_batches), memory_limit):
            continue
        further[i][m] = cost.count(micro_batches) * max(cost.alone())
        if i == 0:
            first[m] = pipeline_latency(cost, micro_batches)
    return first, further


def _partition(order: Sequence[int], cut: Sequence[Sequence[int]], number: int) -> Partition:
    hybrids: list[Hybrid] = []
    stop = len(order)
    for n in range(number, 0, -1):
        start = cut[n][stop] if n > 1 else 0
        hybrids.append(tuple(sorted(order[start:stop])))
        stop = start
    return tuple(sorted(hybrids))


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
