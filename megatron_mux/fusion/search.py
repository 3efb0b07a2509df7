"""The whole plan, judged by the pipeline it makes: fusion, grouping and the number of micro-batches together.

Equation 6 and equation 7 each look at a surrogate. Their answers are candidates here: each is judged by the latency of
its structured template, best bound first, so that few have to be simulated; the best are then refined by moving single
tasks. `exhaustive` judges every partition the same way, to measure how far from optimal `search` is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.cost import CostModel, Hybrid, HybridCost, bucket_cost, fits, lower_bound
from megatron_mux.fusion.grouping import balanced, every_grouping
from megatron_mux.fusion.hybrid import Partition, consecutive, every_partition
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.structured import descending, schedule

_EFFORT = 20_000
"""How long to look for a start, and to refine it: passes simulated or hybrid tasks compared, a tenth of a second."""

_FEW = 16
"""Tasks that are few: each number of micro-batches gets the whole effort."""

_WORTH_A_START = 0.1
"""How much slower than the best so far another number of micro-batches may start, to be refined too."""

_ROUNDING = 1e-12
"""What sums of the same seconds in another order may differ by."""

Array = npt.NDArray[np.float64]

Candidate = tuple[float, int, Partition]
"""A bound on its latency, the number of micro-batches, hybrid tasks."""


@dataclass(frozen=True)
class Layout:
    """Which tasks are computed together, and when.

    Attributes:
        buckets: The hybrid tasks of each bucket, in the order in which they enter the pipeline.
        micro_batches: C.
        latency: Seconds of a step by the structured template.
        surrogate: The same layout's latency by the equations, where it comes from them; else not a number.
    """

    buckets: tuple[tuple[Hybrid, ...], ...]
    micro_batches: int
    latency: float
    surrogate: float = math.nan

    @property
    def partition(self) -> Partition:
        """Its hybrid tasks."""
        return tuple(sorted(hybrid for bucket in self.buckets for hybrid in bucket))


class DoesNotFitError(ValueError):
    """No layout fits into memory; names the tasks that do not even fit alone."""

    def __init__(self, tasks: Sequence[int]) -> None:
        super().__init__(f"tasks {list(tasks)} do not fit into memory at any number of micro-batches")
        self.tasks = tuple(tasks)


class Judge:
    """Latency of layouts, remembered.

    Args:
        model: Costs.
        memory_limit: `[S]` bytes between forward and backward passes; None: no limit.
        most_effort: After how much of it, counted from `rest`, the best found so far has to do.
    """

    def __init__(
        self,
        model: CostModel,
        memory_limit: Sequence[float] | None = None,
        most_effort: float = math.inf,
    ) -> None:
        self.model = model
        self.limit = memory_limit
        self.most_effort = most_effort
        self.effort = 0
        self._costs: dict[tuple[Hybrid, int], HybridCost] = {}
        self._buckets: dict[tuple[tuple[Hybrid, ...], int], BucketCost] = {}
        self._bounds: dict[tuple[Hybrid, int], Array | None] = {}

    def hybrid(self, tasks: Hybrid, micro_batches: int) -> HybridCost:
        """The model's answer, asked for once."""
        key = (tasks, micro_batches)
        if key not in self._costs:
            self._costs[key] = self.model.hybrid(tasks, micro_batches)
        return self._costs[key]

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """The model's answers, those it has not given yet asked for together."""
        new = [tasks for tasks in dict.fromkeys(sets) if (tasks, micro_batches) not in self._costs]
        if new:
            for tasks, cost in zip(new, self.model.hybrids(new, micro_batches), strict=True):
                self._costs[tasks, micro_batches] = cost
        return [self._costs[tasks, micro_batches] for tasks in sets]

    def rest(self) -> None:
        """Begin to count effort anew."""
        self.effort = 0

    def left(self, cost: int) -> int:
        """How many things that cost so much effort can still be done."""
        return int(min(1e9, max(0.0, self.most_effort - self.effort))) // max(1, cost) + 2

    @property
    def is_tired(self) -> bool:
        """Whether all effort is spent."""
        return self.effort > self.most_effort

    def best_grouping(self, partition: Partition, micro_batches: int, below: float) -> Layout | None:
        """The best way to put these hybrid tasks into buckets, if its latency is below `below` and it fits.

        Every number of buckets is considered; equation 7 makes one grouping of each. Where no communication waits to
        be hidden, buckets of several hybrid tasks only make clocks longer, and one bucket each is all there is to try.
        """
        costs = [self.hybrid(hybrid, micro_batches) for hybrid in partition]
        latencies = [sum(cost.forward[:1]) for cost in costs]
        least = len(partition) if not any(any(cost.exposed) for cost in costs) else 1
        best: Layout | None = None
        for count in range(len(partition), least - 1, -1):
            if self.is_tired and below < math.inf:
                break
            if self._least_work(partition, micro_batches, count) >= below:
                continue
            self.effort += len(partition) ** 2 // 4
            grouping = balanced(latencies, count)
            found = self.latency(
                [[partition[i] for i in bucket] for bucket in grouping], micro_batches, below
            )
            if found is not None and found.latency < below:
                best, below = found, found.latency
        return best

    def latency(
        self, grouped: Sequence[Sequence[Hybrid]], micro_batches: int, below: float = math.inf
    ) -> Layout | None:
        """Simulate these buckets, entering in descending order; None if they do not fit or cannot be below `below`."""
        buckets = [self._bucket(tuple(hybrids), micro_batches) for hybrids in grouped]
        if not all(fits(bucket, self.limit) for bucket in buckets) or lower_bound(buckets) >= below:
            return None
        order = descending(buckets)
        _, latency = schedule([buckets[i] for i in order], self.limit)
        self.effort += 2 * sum(bucket.micro_batches * bucket.stages for bucket in buckets)
        return Layout(tuple(tuple(grouped[i]) for i in order), micro_batches, latency)

    def bound(self, partition: Partition, micro_batches: int) -> float:
        """Seconds that no grouping of these hybrid tasks can beat; infinite if one of them does not fit."""
        self.effort += len(partition)
        bounds: list[Array] = []
        for hybrid in partition:
            bound = self._bound_of(hybrid, micro_batches)
            if bound is None:
                return math.inf
            bounds.append(bound)
        together = np.stack(bounds)  # [N, 3, S]
        seconds = together[:, 0].sum(axis=0) + together[:, 1].min(axis=0) + together[:, 2].min(axis=0)
        return float(seconds.max()) * (1 - _ROUNDING)

    def _bucket(self, hybrids: tuple[Hybrid, ...], micro_batches: int) -> BucketCost:
        key = (hybrids, micro_batches)
        if key not in self._buckets:
            self._buckets[key] = bucket_cost([self.hybrid(h, micro_batches) for h in hybrids], micro_batches)
        return self._buckets[key]

    def _bound_of(self, hybrid: Hybrid, micro_batches: int) -> Array | None:
        """`[3, S]` of a hybrid task whose communication others hide: its work on each stage, and what a micro-batch
        of it takes on the stages before and on the way back through them (see `lower_bound`); None: does not fit.
        """
        key = (hybrid, micro_batches)
        if key not in self._bounds:
            cost = self.hybrid(hybrid, micro_batches)
            count = cost.count(micro_batches)
            hidden = BucketCost(
                count, cost.forward, cost.backward, memory=cost.memory, transfer=cost.transfer
            )
            bound: Array | None = None
            if fits(hidden, self.limit):
                passes = np.array([cost.forward, cost.backward])
                on_the_way = passes[:, :-1] + np.array(cost.transfer or [0.0] * (hidden.stages - 1))
                before = np.concatenate([np.zeros((2, 1)), on_the_way.cumsum(axis=1)], axis=1)
                bound = np.concatenate([count * passes.sum(axis=0)[None], before])
            self._bounds[key] = bound
        return self._bounds[key]

    def _least_work(self, partition: Partition, micro_batches: int, buckets: int) -> float:
        """Seconds of work on the busiest stage in so many buckets, at the least.

        Then 2 P - N of N hybrid tasks have a bucket to themselves, or more, and nothing hides their communication.
        """
        costs = [self.hybrid(hybrid, micro_batches) for hybrid in partition]
        alone = max(0, 2 * buckets - len(costs))
        most = 0.0
        for stage in range(len(costs[0].forward)):
            counts = [cost.count(micro_batches) for cost in costs]
            exposed = sorted(
                count * (cost.exposed[stage] if cost.exposed else 0.0)
                for cost, count in zip(costs, counts, strict=True)
            )[:alone]
            passes = zip(costs, counts, strict=True)
            work = sum(count * (cost.forward[stage] + cost.backward[stage]) for cost, count in passes)
            most = max(most, work + 2 * sum(exposed))
        return most


def search(
    model: CostModel,
    tokens: Sequence[float],
    micro_batches: Sequence[int],
    memory_limit: Sequence[float] | None = None,
) -> Layout:
    """The best layout found.

    Args:
        model: Costs.
        tokens: Of each task's step; tasks are sorted by them.
        micro_batches: Values of C to try.
        memory_limit: `[S]` bytes that a stage may keep between forward and backward passes.

    Raises:
        DoesNotFitError: Some task does not fit alone at any of the numbers of micro-batches.
    """
    # Where tasks are few a little more finds the best there is; where they are many nothing does in reasonable time.
    effort = _EFFORT if len(tokens) <= _FEW else _EFFORT / len(micro_batches)
    judge = Judge(model, memory_limit, effort)
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
