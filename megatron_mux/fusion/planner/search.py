"""The search for an arrangement: hybrid tasks, buckets, entry order and the number of micro-batches together.

Equation 6 proposes hybrid tasks, equation 7 buckets; the most promising are evaluated, and the best of them improved by
moving single tasks, hybrid tasks and buckets for as long as that helps and the budget lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, permutations, product

from megatron_mux.fusion.planner.arrangement import Arrangement, ArrangementEvaluator, Buckets
from megatron_mux.fusion.planner.cost import CostModel, Hybrid
from megatron_mux.fusion.planner.grouping import Partition, consecutive

_BUDGET = 120_000
"""Effort of improving what was found: passes simulated or hybrid tasks compared. Finding starts for all numbers of
micro-batches may take as much, moving buckets at last again: with 4 to 6 tasks the whole search took 0.34 s of CPU time
in the median, 1.2 s at most."""

_FEW = 16
"""Up to this number of tasks the search has the whole budget, and mostly finds the optimum."""

_FRACTION = 1 / 8
"""Share of the budget for more tasks: nothing finds their optimum, and most of the time goes into costs."""


def search(
    model: CostModel,
    tokens: Sequence[float],
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
    virtual: int = 1,
    steps: int = 1,
) -> Arrangement | None:
    """The best arrangement found; None if some task does not fit alone at any of the numbers of micro-batches.

    Args:
        tokens: Tokens of each task's step; tasks are sorted by them.
        micro_batches: Values of C to try.
        memory_limit: `[S]` bytes that a stage may take for passes.
    """
    budget = _BUDGET * (1 if len(tokens) <= _FEW else _FRACTION)
    evaluator = ArrangementEvaluator(model, memory_limit, budget, virtual, steps)
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    # What is best for one number of micro-batches may be better for another.
    proposed = [a for count in micro_batches for _, a in consecutive(evaluator, order, count, memory_limit)]
    partitions = list(dict.fromkeys(proposed))
    starts: list[Arrangement] = []
    for count in micro_batches:
        candidates = sorted(zip(evaluator.least(partitions, count), partitions, strict=True))
        evaluator.renew(1 / len(micro_batches))
        below = min((a.latency for a in starts), default=math.inf)
        starts += _starts(evaluator, candidates, count, below if len(order) > _FEW else None)
    if not starts:
        return None
    starts.sort(key=lambda start: start.latency)
    evaluator.renew()
    kept = starts[:1]
    for start in starts:
        if evaluator.is_exhausted:
            break
        kept.append(_improved(evaluator, start, tokens))
    evaluator.renew()
    by_latency = sorted(dict.fromkeys(kept), key=lambda a: a.latency)
    moved = [_improved(evaluator, a) for a in by_latency if not evaluator.is_exhausted]
    return min(moved, key=lambda a: a.latency)


def _starts(
    evaluator: ArrangementEvaluator,
    candidates: Sequence[tuple[float, Partition]],
    count: int,
    below: float | None,
) -> list[Arrangement]:
    """Partitions, in the order of their bounds, in buckets by equation 7, while the budget lasts; of many tasks, with
    `below`, only what is faster than that and all before it, since few can be improved.
    """
    starts: list[Arrangement] = []
    most = math.inf if below is None else below
    for least, partition in candidates:
        if least >= most:
            break
        for buckets in evaluator.groupings(partition, count):
            if (starts or most < math.inf) and evaluator.is_exhausted:
                return starts
            if evaluator.bound(buckets, count) < most:
                start = evaluator.latency(evaluator.orders(buckets, count)[0], count, most)
                if start is not None:
                    starts.append(start)
                    most = most if below is None else start.latency
    return starts


def _improved(
    evaluator: ArrangementEvaluator, best: Arrangement, tokens: Sequence[float] | None = None
) -> Arrangement:
    """Move to better neighbours, those with the least bounds first, until there are none or the budget is spent.

    Args:
        evaluator: Evaluates them.
        best: Where to begin.
        tokens: Of each task: single tasks are moved; None: hybrid tasks and buckets.
    """
    count, improved = best.micro_batches, True
    few = sum(map(len, _hybrids(best.buckets))) <= _FEW
    while improved:
        improved = False
        moves = _other_buckets(best.buckets) if tokens is None else _other_tasks(best.buckets, tokens)
        neighbours = list(islice(moves, evaluator.affordable(2 * len(best.buckets))))
        bounds = evaluator.least([_hybrids(sets) for sets in neighbours], count)
        for least, i in sorted(zip(bounds, range(len(neighbours)), strict=True)):
            below = best.latency * (1 - 1e-9)
            if least >= below or evaluator.is_exhausted:
                break
            if evaluator.bound(neighbours[i], count) < below:
                orders = [neighbours[i]] if tokens is None else evaluator.orders(neighbours[i], count)
                for buckets in orders[: None if few else 1]:
                    latency = evaluator.latency(buckets, count, best.latency * (1 - 1e-9))
                    if latency is not None:
                        best, improved = latency, True
    return best


def _other_tasks(buckets: Buckets, tokens: Sequence[float]) -> Iterator[Buckets]:
    """One task on its own; or two hybrid tasks merged, a task of one moved to the other, or two exchanged: those of
    nearly as many tokens first. Hybrid tasks stay in their buckets.
    """
    every = _hybrids(buckets)
    for hybrid in every:
        if len(hybrid) > 1:
            for task in hybrid:
                alone = _changed(buckets, {hybrid: _without(hybrid, task)})
                yield (*alone, ((task,),))
    by_size = sorted(every, key=lambda hybrid: (sum(tokens[t] for t in hybrid) / len(hybrid), hybrid))
    for apart in range(1, len(by_size)):
        for here, there in zip(by_size, by_size[apart:], strict=False):
            yield _changed(buckets, {here: (*here, *there), there: ()})
            for src, other in ((here, there), (there, here)):
                if len(src) > 1:
                    yield from (_changed(buckets, {src: _without(src, t), other: (*other, t)}) for t in src)
            if len(here) > 1 or len(there) > 1:
                for a, b in product(here, there):
                    yield _changed(buckets, {here: (*_without(here, a), b), there: (*_without(there, b), a)})


def _other_buckets(buckets: Buckets) -> Iterator[Buckets]:
    """Two buckets swapped in the entry order; a hybrid task in another bucket; two hybrid tasks exchanged."""
    for a, b in combinations(range(len(buckets)), 2):
        swapped = list(buckets)
        swapped[a], swapped[b] = buckets[b], buckets[a]
        yield tuple(swapped)
    if all(len(bucket) == 1 for bucket in buckets):
        return
    for a, b in permutations(range(len(buckets)), 2):
        for given in buckets[a]:
            left = tuple(h for h in buckets[a] if h != given)
            for taken in (None, *(buckets[b] if a < b else ())):
                changed = list(buckets)
                changed[a] = left if taken is None else (*left, taken)
                changed[b] = (*(h for h in buckets[b] if h != taken), given)
                yield tuple(bucket for bucket in changed if bucket)


def _hybrids(buckets: Buckets) -> list[Hybrid]:
    return [hybrid for bucket in buckets for hybrid in bucket]


def _without(hybrid: Hybrid, task: int) -> Hybrid:
    return tuple(t for t in hybrid if t != task)


def _changed(buckets: Buckets, new: Mapping[Hybrid, Hybrid]) -> Buckets:
    """The buckets with other hybrid tasks in the places of some; without those that are empty then."""
    changed = (
        tuple(tuple(sorted(tasks)) for hybrid in bucket if (tasks := new.get(hybrid, hybrid)))
        for bucket in buckets
    )
    return tuple(bucket for bucket in changed if bucket)
