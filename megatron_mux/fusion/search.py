"""The search for an arrangement: hybrid tasks, buckets, entry order and the number of micro-batches together.

Equation 6's and equation 7's answers are candidates: those with the best bounds are evaluated first, so that few have
to be simulated; the best are then refined by moving single tasks, and at last by other buckets and entry orders.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from megatron_mux.fusion.arrangement import Arrangement, ArrangementEvaluator
from megatron_mux.fusion.cost import CostModel, Hybrid
from megatron_mux.fusion.grouping import Partition, consecutive

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
    for count in micro_batches:
        evaluator.renew()
        below = min((start.latency for start in starts), default=math.inf) * (1 + _WORTH_A_START)
        candidates = [(evaluator.bound(p, count), count, p) for _, p in _equation_6(evaluator, tokens, count)]
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
        refined.append(_refine(evaluator, start))
    refined.sort(key=lambda arrangement: arrangement.latency)
    best = _from_elsewhere(evaluator, tokens, refined)
    evaluator.renew()
    return _regroup(evaluator, best)


def _from_elsewhere(
    evaluator: ArrangementEvaluator, tokens: Sequence[float], refined: Sequence[Arrangement]
) -> Arrangement:
    """The best of `refined` and of what starts with other numbers of hybrid tasks lead to: single moves rarely change
    these numbers.
    """
    best = refined[0]
    evaluator.renew()
    for count in [arrangement.micro_batches for arrangement in refined]:
        for _, partition in _equation_6(evaluator, tokens, count):
            if evaluator.is_exhausted:
                return best
            if len(partition) == len(best.partition):
                continue
            start = evaluator.best_grouping(partition, count, math.inf)
            if start is not None:
                best = min(best, _refine(evaluator, start), key=lambda arrangement: arrangement.latency)
    return best


def _equation_6(
    evaluator: ArrangementEvaluator, tokens: Sequence[float], micro_batches: int
) -> list[tuple[float, Partition]]:
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], i))
    return consecutive(evaluator, order, micro_batches, evaluator.limit)


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


def _refine(evaluator: ArrangementEvaluator, best: Arrangement) -> Arrangement:
    """Move tasks for as long as that lowers the latency and the budget lasts."""
    count = best.micro_batches
    improved = True
    while improved:
        improved = False
        candidates: list[tuple[float, Partition]] = []
        neighbours = sorted(set(_neighbours(best.partition)))
        affordable = evaluator.affordable(len(best.partition))
        evaluator.hybrids([h for p in neighbours[:affordable] for h in p], count)
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


def _neighbours(partition: Partition) -> Iterator[Partition]:
    """One task moved to another hybrid task or on its own; two tasks exchanged; two hybrid tasks merged."""
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


def _too_large(evaluator: ArrangementEvaluator, tasks: int, micro_batches: Sequence[int]) -> list[int]:
    return [
        task
        for task in range(tasks)
        if all(evaluator.bound(((task,),), count) == math.inf for count in micro_batches)
    ]
