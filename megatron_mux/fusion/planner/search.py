"""The search for an arrangement: hybrid tasks, buckets, entry order and the number of micro-batches together.

Equation 6's and equation 7's answers are candidates: those with the best bounds are evaluated first, so that few have
to be simulated; the best are then refined by moving single tasks, and at last by other buckets and entry orders.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, islice, permutations, product

from megatron_mux.fusion.planner.arrangement import Arrangement, ArrangementEvaluator
from megatron_mux.fusion.planner.cost import CostModel, Hybrid
from megatron_mux.fusion.planner.grouping import Partition, consecutive

_BUDGET = 60_000
"""Effort of finding a start, and of refining it: passes simulated or hybrid tasks compared; a tenth of a second."""

_FEW = 16
"""Up to this number of tasks, each number of micro-batches gets the whole budget; of more, a fraction of it."""

_FRACTION = 1 / 4
"""Share of the budget for many tasks, divided among the numbers of micro-batches: most of the time goes into costs."""

_WORTH_A_START = 0.1
"""How much slower than the best so far another number of micro-batches may start and still be refined."""

Candidate = tuple[float, int, Partition]
"""A bound on its latency, the number of micro-batches, hybrid tasks."""


class DoesNotFitError(ValueError):
    """No arrangement fits into memory; names the tasks that do not even fit alone."""

    def __init__(self, tasks: Sequence[int]) -> None:
        super().__init__(f"tasks {list(tasks)} do not fit into memory at any number of micro-batches")
        self.tasks = tuple(tasks)


def search(
    model: CostModel,
    tokens: Sequence[float],
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
    virtual: int = 1,
    steps: int = 1,
) -> Arrangement:
    """The best arrangement found.

    Args:
        model: Costs.
        tokens: Tokens of each task's step; tasks are sorted by them.
        micro_batches: Values of C to try.
        memory_limit: `[S]` bytes that a stage may take for passes.
        virtual: Stages per rank.
        steps: Steps between two flushes of the pipeline.

    Raises:
        DoesNotFitError: Some task does not fit alone at any of the numbers of micro-batches.
    """
    # With few tasks a little more effort finds the optimum; with many nothing does in reasonable time.
    budget = _BUDGET if len(tokens) <= _FEW else _BUDGET * _FRACTION / len(micro_batches)
    evaluator = ArrangementEvaluator(model, memory_limit, budget, virtual, steps)
    starts: list[Arrangement] = []
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    proposals = {}
    for count in micro_batches:
        evaluator.renew()
        below = min((start.latency for start in starts), default=math.inf) * (1 + _WORTH_A_START)
        proposals[count] = [p for _, p in consecutive(model, order, count, memory_limit)]
        evaluator.hybrids([hybrid for partition in proposals[count] for hybrid in partition], count)
        candidates = [(evaluator.bound(p, count), count, p) for p in proposals[count]]
        start = _best_first(evaluator, candidates, below)
        if start is not None:
            starts.append(start)
    if not starts:
        raise DoesNotFitError(_too_large(evaluator, len(tokens), micro_batches))
    starts.sort(key=lambda arrangement: arrangement.latency)
    # Another number of micro-batches wants other hybrid tasks: each one's best is refined.
    refined = []
    for start in starts:
        evaluator.renew()
        refined.append(_refine(evaluator, tokens, start))
    refined.sort(key=lambda arrangement: arrangement.latency)
    best = _from_elsewhere(evaluator, tokens, proposals, refined)
    evaluator.renew()
    return _regroup(evaluator, best)


def _from_elsewhere(
    evaluator: ArrangementEvaluator,
    tokens: Sequence[float],
    proposals: Mapping[int, Sequence[Partition]],
    refined: Sequence[Arrangement],
) -> Arrangement:
    """The best of `refined` and of what starts with other numbers of hybrid tasks lead to: single moves rarely change
    these numbers.
    """
    best = refined[0]
    evaluator.renew()
    for count in [arrangement.micro_batches for arrangement in refined]:
        for partition in proposals[count]:
            if evaluator.is_exhausted:
                return best
            if len(partition) == len(best.partition):
                continue
            start = evaluator.best_grouping(partition, count, math.inf)
            if start is not None:
                best = min(
                    best, _refine(evaluator, tokens, start), key=lambda arrangement: arrangement.latency
                )
    return best


def _best_first(
    evaluator: ArrangementEvaluator, candidates: list[Candidate], below: float
) -> Arrangement | None:
    """Evaluate candidates in the order of their bounds, until no bound is below the best latency.

    Args:
        evaluator: Evaluates them.
        candidates: Emptied as far as needed.
        below: The latency to beat; None is found if no candidate does.
    """
    heapq.heapify(candidates)
    best: Arrangement | None = None
    while candidates and candidates[0][0] < below and not (best is not None and evaluator.is_exhausted):
        _, count, partition = heapq.heappop(candidates)
        found = evaluator.best_grouping(partition, count, below)
        if found is not None:
            best, below = found, found.latency
    return best


def _refine(evaluator: ArrangementEvaluator, tokens: Sequence[float], best: Arrangement) -> Arrangement:
    """Move tasks for as long as that lowers the latency and the budget lasts, which is asked before they are listed."""
    count = best.micro_batches
    improved = True
    while improved:
        improved = False
        candidates: list[tuple[float, Partition]] = []
        affordable = evaluator.affordable(len(best.partition))
        neighbours = list(dict.fromkeys(islice(_neighbours(best.partition, tokens), affordable)))
        evaluator.hybrids([h for p in neighbours for h in p], count)
        for partition in neighbours:
            if evaluator.is_exhausted:
                break
            bound = evaluator.bound(partition, count)
            if bound < best.latency:
                candidates.append((bound, partition))
        heapq.heapify(candidates)
        while candidates and candidates[0][0] < best.latency and not evaluator.is_exhausted:
            _, partition = heapq.heappop(candidates)
            found = evaluator.best_grouping(partition, count, best.latency)
            if found is not None:
                best, improved = found, True
    return best


def _regroup(evaluator: ArrangementEvaluator, best: Arrangement) -> Arrangement:
    """Move hybrid tasks to other buckets, and buckets to other places, while that helps and the budget lasts."""
    improved = True
    while improved:
        improved = False
        for buckets in _other_buckets(best.buckets):
            if evaluator.is_exhausted:
                return best
            below = best.latency * (1 - 1e-9)
            if not evaluator.is_below(buckets, best.micro_batches, below):
                continue
            found = evaluator.latency(buckets, best.micro_batches, below)
            if found is not None:
                best, improved = found, True
                break
    return best


def _other_buckets(buckets: Sequence[tuple[Hybrid, ...]]) -> Iterator[list[tuple[Hybrid, ...]]]:
    """Two buckets swapped in the entry order; a hybrid task in another bucket; two hybrid tasks exchanged."""
    for a, b in combinations(range(len(buckets)), 2):
        swapped = list(buckets)
        swapped[a], swapped[b] = buckets[b], buckets[a]
        yield swapped
    if all(len(bucket) == 1 for bucket in buckets):
        return
    for a, b in permutations(range(len(buckets)), 2):
        for given in buckets[a]:
            left = tuple(h for h in buckets[a] if h != given)
            for taken in (None, *(buckets[b] if a < b else ())):
                changed = list(buckets)
                changed[a] = left if taken is None else (*left, taken)
                changed[b] = (*(h for h in buckets[b] if h != taken), given)
                yield [bucket for bucket in changed if bucket]


def _neighbours(partition: Partition, tokens: Sequence[float]) -> Iterator[Partition]:
    """One task on its own; or two hybrid tasks merged, a task of one moved to the other, or two exchanged: those of
    nearly as many tokens first.
    """
    for hybrid in partition:
        others = [other for other in partition if other != hybrid]
        if len(hybrid) > 1:
            yield from (_sorted([*others, _without(hybrid, task), (task,)]) for task in hybrid)
    by_size = sorted(partition, key=lambda hybrid: (sum(tokens[t] for t in hybrid) / len(hybrid), hybrid))
    for apart in range(1, len(by_size)):
        for here, there in zip(by_size, by_size[apart:], strict=False):
            others = [hybrid for hybrid in partition if hybrid not in (here, there)]
            yield _sorted([*others, (*here, *there)])
            for one, other in ((here, there), (there, here)):
                if len(one) > 1:
                    yield from (_sorted([*others, _without(one, t), (*other, t)]) for t in one)
            if len(here) > 1 or len(there) > 1:
                for a, b in product(here, there):
                    yield _sorted([*others, (*_without(here, a), b), (*_without(there, b), a)])


def _without(hybrid: Hybrid, task: int) -> Hybrid:
    return tuple(t for t in hybrid if t != task)


def _sorted(hybrids: Sequence[Hybrid]) -> Partition:
    return tuple(sorted(tuple(sorted(hybrid)) for hybrid in hybrids))


def _too_large(evaluator: ArrangementEvaluator, tasks: int, micro_batches: Sequence[int]) -> list[int]:
    return [
        task
        for task in range(tasks)
        if all(evaluator.bound(((task,),), count) == math.inf for count in micro_batches)
    ]
