"""The search for a layout: hybrid tasks, buckets and the number of micro-batches together.

Equation 6's and equation 7's answers are candidates here: the best bounds are judged first, so that few have to be
simulated; the best are then refined by moving single tasks. `exhaustive` judges every partition the same way, to
measure how far from optimal `search` is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

from megatron_mux.fusion.cost import CostModel, Hybrid
from megatron_mux.fusion.grouping import every_grouping
from megatron_mux.fusion.hybrid import Partition, consecutive, every_partition
from megatron_mux.fusion.judge import Judge, Layout

_EFFORT = 20_000
"""How long to look for a start, and to refine it: passes simulated or hybrid tasks compared, a tenth of a second."""

_FEW = 16
"""Tasks that are few: each number of micro-batches gets the whole effort."""

_WORTH_A_START = 0.1
"""How much slower than the best so far another number of micro-batches may start, to be refined too."""

Candidate = tuple[float, int, Partition]
"""A bound on its latency, the number of micro-batches, hybrid tasks."""


class DoesNotFitError(ValueError):
    """No layout fits into memory; names the tasks that do not even fit alone."""

    def __init__(self, tasks: Sequence[int]) -> None:
        super().__init__(f"tasks {list(tasks)} do not fit into memory at any number of micro-batches")
        self.tasks = tuple(tasks)


def search(
    model: CostModel,
    tokens: Sequence[float],
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
    virtual: int = 1,
) -> Layout:
    """The best layout found.

    Args:
        model: Costs.
        tokens: Of each task's step; tasks are sorted by them.
        micro_batches: Values of C to try.
        memory_limit: `[S]` bytes that a stage may take for passes.
        virtual: Stages of each rank.

    Raises:
        DoesNotFitError: Some task does not fit alone at any of the numbers of micro-batches.
    """
    # Where tasks are few a little more finds the best there is; where they are many nothing does in reasonable time.
    effort = _EFFORT if len(tokens) <= _FEW else _EFFORT / len(micro_batches)
    judge = Judge(model, memory_limit, effort, virtual)
    starts: list[Layout] = []
    for count in micro_batches:
        judge.rest()
        below = min((start.latency for start in starts), default=math.inf) * (1 + _WORTH_A_START)
        candidates = [(judge.bound(p, count), count, p) for _, p in _equation_6(judge, tokens, count)]
        start = _best_first(judge, candidates, below)
        if start is not None:
            starts.append(start)
    if not starts:
        raise DoesNotFitError(_too_large(judge, len(tokens), micro_batches))
    starts.sort(key=lambda layout: layout.latency)
    # Another number of micro-batches wants other hybrid tasks: each is a place of its own to start from.
    refined = []
    for start in starts:
        judge.rest()
        refined.append(_refine(judge, start))
    refined.sort(key=lambda layout: layout.latency)
    return _from_elsewhere(judge, tokens, refined)


def _from_elsewhere(judge: Judge, tokens: Sequence[float], refined: Sequence[Layout]) -> Layout:
    """The best of `refined` and of what other numbers of hybrid tasks lead to: single moves rarely change these."""
    best = refined[0]
    judge.rest()
    for count in [layout.micro_batches for layout in refined]:
        for _, partition in _equation_6(judge, tokens, count):
            if judge.is_tired:
                return best
            if len(partition) == len(best.partition):
                continue
            start = judge.best_grouping(partition, count, math.inf)
            if start is not None:
                best = min(best, _refine(judge, start), key=lambda layout: layout.latency)
    return best


def plain_equation_6(
    model: CostModel,
    tokens: Sequence[float],
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
) -> Layout:
    """The partition of least F, without a look at the pipeline it makes: what the paper's surrogate alone gives.

    Raises:
        DoesNotFitError: See `search`.
    """
    judge = Judge(model, memory_limit)
    found = [
        (value, count, partition)
        for count in micro_batches
        for value, partition in _equation_6(judge, tokens, count)
    ]
    if not found:
        raise DoesNotFitError(_too_large(judge, len(tokens), micro_batches))
    value, count, partition = min(found)
    layout = judge.best_grouping(partition, count, math.inf)
    assert layout is not None  # it fits: `consecutive` builds nothing else
    return Layout(layout.buckets, count, layout.latency, value)


def _equation_6(judge: Judge, tokens: Sequence[float], micro_batches: int) -> list[tuple[float, Partition]]:
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    return consecutive(judge, order, micro_batches, judge.limit)


def exhaustive(
    model: CostModel,
    tasks: int,
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
    every_bucket: bool = False,
) -> Layout:
    """The best layout of all partitions, consecutive or not. For up to eight tasks.

    Args:
        model: Costs.
        tasks: How many.
        micro_batches: Values of C to try.
        memory_limit: As for `search`.
        every_bucket: Try every grouping into buckets too, not equation 7's alone.

    Raises:
        DoesNotFitError: See `search`.
    """
    judge = Judge(model, memory_limit)
    candidates = [
        (judge.bound(partition, count), count, partition)
        for partition in every_partition(range(tasks))
        for count in micro_batches
    ]
    best = _best_first(judge, candidates, every_bucket=every_bucket)
    if best is None:
        raise DoesNotFitError(_too_large(judge, tasks, micro_batches))
    return best


def _best_first(
    judge: Judge, candidates: list[Candidate], below: float = math.inf, every_bucket: bool = False
) -> Layout | None:
    """Judge candidates in the order of their bounds, until no bound is below the best latency.

    Args:
        judge: Tells their latencies.
        candidates: Changed.
        below: Latency to look for; None is found if there is none.
        every_bucket: See `exhaustive`.
    """
    heapq.heapify(candidates)
    best: Layout | None = None
    while candidates and candidates[0][0] < below and not (best is not None and judge.is_tired):
        _, count, partition = heapq.heappop(candidates)
        grouped = _all_groupings if every_bucket else Judge.best_grouping
        found = grouped(judge, partition, count, below)
        if found is not None:
            best, below = found, found.latency
    return best


def _all_groupings(judge: Judge, partition: Partition, count: int, below: float) -> Layout | None:
    best: Layout | None = None
    for grouping in every_grouping(len(partition)):
        found = judge.latency([[partition[i] for i in bucket] for bucket in grouping], count, below)
        if found is not None and found.latency < below:
            best, below = found, found.latency
    return best


def _refine(judge: Judge, best: Layout) -> Layout:
    """Move tasks for as long as that lowers the simulated latency and the effort is not spent."""
    count = best.micro_batches
    improved = True
    while improved:
        improved = False
        candidates: list[tuple[float, Partition]] = []
        neighbours = sorted(set(_neighbours(best.partition)))
        judge.hybrids([h for p in neighbours[: judge.left(len(best.partition))] for h in p], count)
        for partition in neighbours:
            if judge.is_tired:
                break
            bound = judge.bound(partition, count)
            if bound < best.latency:
                candidates.append((bound, partition))
        heapq.heapify(candidates)
        while candidates and candidates[0][0] < best.latency and not judge.is_tired:
            _, partition = heapq.heappop(candidates)
            found = judge.best_grouping(partition, count, best.latency)
            if found is not None:
                best, improved = found, True
    return best


def _neighbours(partition: Partition) -> Iterator[Partition]:
    """One task in another hybrid task or on its own; two exchanged; two hybrid tasks as one."""
    for a, here in enumerate(partition):
        others = [hybrid for i, hybrid in enumerate(partition) if i != a]
        for b in range(a, len(others)):
            yield _sorted([*others[:b], *others[b + 1 :], (*here, *others[b])])
        for task in here:
            rest = tuple(t for t in here if t != task)
            if rest:
                yield _sorted([*others, rest, (task,)])
            for b, there in enumerate(others):
                without = others[:b] + others[b + 1 :]
                yield _sorted([*without, *([rest] if rest else []), (*there, task)])
                for other in there:
                    if rest and task < other:
                        kept = tuple(t for t in there if t != other)
                        yield _sorted([*without, (*rest, other), (*kept, task)])


def _sorted(hybrids: Sequence[Hybrid]) -> Partition:
    return tuple(sorted(tuple(sorted(hybrid)) for hybrid in hybrids))


def _too_large(judge: Judge, tasks: int, micro_batches: Sequence[int]) -> list[int]:
    return [
        task
        for task in range(tasks)
        if all(judge.bound(((task,),), count) == math.inf for count in micro_batches)
    ]
