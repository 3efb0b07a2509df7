"""Evaluates arrangements of tasks by the published latency of the pipeline they make, and bounds it from below.

Equations 6 and 7 each minimise a surrogate; the search asks for the latency of the whole plan's template instead.
Answers are remembered, and effort is counted, so that a search can stop within its budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_mux.fusion.launch_order import MOST_CHAINS
from megatron_mux.fusion.planner.cost import (
    BUSY_ENOUGH,
    CostModel,
    Hybrid,
    HybridCost,
    bucket_cost,
    busiest,
    entry_orders,
    fits,
    kept_limit,
    lower_bound,
    seconds_per_step,
)
from megatron_mux.fusion.planner.grouping import (
    Grouping,
    Partition,
    balanced,
    every_grouping,
    numbers,
)
from megatron_mux.pipeline.bucket import BucketCost, sizes_of
from megatron_mux.pipeline.structured import StructuredRun

_NEAR = 1.1
"""An arrangement whose latency in the first entry order is not this near to the best is not tried in others."""

_LAUNCHES = 300
"""Pieces of a hybrid task that are launched to price a bucket on a stage: a few layers, both passes, each order."""

_FEW_HYBRID_TASKS = 5
"""Up to this number of hybrid tasks all groupings into buckets are looked at: 52."""


@dataclass(frozen=True)
class Arrangement:
    """Which tasks are computed together, and when.

    Attributes:
        buckets: The hybrid tasks of each bucket, in the order in which buckets enter the pipeline.
        micro_batches: C.
        latency: Seconds of a step, by the structured template.
    """

    buckets: tuple[tuple[Hybrid, ...], ...]
    micro_batches: int
    latency: float

    @property
    def partition(self) -> Partition:
        """Its hybrid tasks."""
        return tuple(sorted(hybrid for bucket in self.buckets for hybrid in bucket))


class ArrangementEvaluator:
    """Latencies of arrangements, remembered.

    Args:
        model: Costs.
        memory_limit: `[S]` bytes that a stage may take for passes, kept between them and taken in them; None: no limit.
        budget: Effort, counted from `renew`, after which the search has to stop.
        virtual: Stages per rank; a stage may keep its share of its rank's limit.
        steps: Steps between two flushes of the pipeline.
    """

    def __init__(
        self,
        model: CostModel,
        memory_limit: Sequence[float] | None = None,
        budget: float = math.inf,
        virtual: int = 1,
        steps: int = 1,
    ) -> None:
        self.model = model
        self.limit = memory_limit
        self.virtual = virtual
        self.steps = steps
        ranks = len(memory_limit or ()) // virtual
        self.rank_limit = [sum(memory_limit[rank::ranks]) for rank in range(ranks)] if memory_limit else None
        self.budget = budget
        self.spent = 0
        self._costs: dict[tuple[Hybrid, int], HybridCost] = {}
        self._buckets: dict[tuple[tuple[Hybrid, ...], int], BucketCost] = {}

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """The model's answers, the new ones asked for together."""
        new = [tasks for tasks in dict.fromkeys(sets) if (tasks, micro_batches) not in self._costs]
        if new:
            for tasks, cost in zip(new, self.model.hybrids(new, micro_batches), strict=True):
                self._costs[tasks, micro_batches] = cost
        return [self._costs[tasks, micro_batches] for tasks in sets]

    def renew(self) -> None:
        """Start counting effort from zero."""
        self.spent = 0

    def affordable(self, cost: int) -> int:
        """How many more things of this cost the budget allows."""
        return int(min(1e9, max(0.0, self.budget - self.spent))) // max(1, cost) + 2

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget is spent."""
        return self.spent > self.budget

    def best_grouping(self, partition: Partition, micro_batches: int, below: float) -> Arrangement | None:
        """The best way to put these hybrid tasks into buckets, if its latency is below `below` and it fits.

        Without communication to hide, buckets of several hybrid tasks only make clocks longer, so that one bucket each
        is all there is to try. Else all groupings of a few hybrid tasks are bounded; of many, equation 7 makes one for
        each number of buckets.
        """
        best: Arrangement | None = None
        for bound, grouping in sorted(self._groupings(partition, micro_batches, below)):
            if bound >= below or (self.is_exhausted and below < math.inf):
                break
            found = self.best_order(
                [[partition[i] for i in bucket] for bucket in grouping], micro_batches, below
            )
            if found is not None:
                best, below = found, found.latency
        return best

    def _groupings(
        self, partition: Partition, micro_batches: int, below: float
    ) -> Iterator[tuple[float, Grouping]]:
        """Groupings to try, with bounds on their latency below `below`."""
        costs = self.hybrids(partition, micro_batches)
        few = len(partition) <= _FEW_HYBRID_TASKS
        if not any(cost.gains_by_company for cost in costs):
            groupings: Iterable[Grouping] = [tuple((i,) for i in range(len(partition)))]
        elif few:
            groupings = every_grouping(len(partition))
        else:
            latencies = [sum(cost.forward[:1]) for cost in costs]
            counts = (len(partition) + 1 - n for n in numbers(len(partition)))
            groupings = (balanced(latencies, count) for count in counts)
        for i, grouping in enumerate(groupings):
            if i and not few and self.is_exhausted:
                return
            self.spent += len(partition)
            if max(map(len, grouping)) > MOST_CHAINS:
                continue
            grouped = [tuple(partition[i] for i in bucket) for bucket in grouping]
            bound = lower_bound([self._bucket(hybrids, micro_batches) for hybrids in grouped], self.steps)
            if bound < below:
                yield bound, grouping

    def best_order(
        self, grouped: Sequence[Sequence[Hybrid]], micro_batches: int, below: float = math.inf
    ) -> Arrangement | None:
        """The buckets in the best entry order tried; None if they do not fit or take at least `below`."""
        if not self.is_below(grouped, micro_batches, below):
            return None
        buckets = [self._bucket(tuple(hybrids), micro_batches) for hybrids in grouped]
        work = busiest(buckets, sizes_of(buckets), buckets[0].stages // self.virtual)
        best: Arrangement | None = None
        for order in entry_orders(buckets):
            found = self.latency([grouped[i] for i in order], micro_batches, below * _NEAR)
            if found is None:
                break
            if found.latency < below:
                best, below = found, found.latency
            if found.latency <= work * BUSY_ENOUGH:
                break
        return best

    def is_below(self, grouped: Sequence[Sequence[Hybrid]], micro_batches: int, below: float) -> bool:
        """Whether these buckets fit and might take less than `below`, whatever their order."""
        self.spent += len(grouped)
        if max(map(len, grouped)) > MOST_CHAINS:
            return False
        buckets = [self._bucket(tuple(hybrids), micro_batches) for hybrids in grouped]
        return (
            all(fits(bucket, self.limit) for bucket in buckets) and lower_bound(buckets, self.steps) < below
        )

    def latency(
        self, grouped: Sequence[Sequence[Hybrid]], micro_batches: int, below: float = math.inf
    ) -> Arrangement | None:
        """These buckets, entering in this order; None if they do not fit or take at least `below`."""
        buckets = [self._bucket(tuple(hybrids), micro_batches) for hybrids in grouped]
        limit = None if self.rank_limit is None else kept_limit(buckets, self.rank_limit)
        sizes = sizes_of(buckets)

        def simulated(steps: int) -> float:
            self.spent += 2 * steps * sum(bucket.micro_batches * bucket.stages for bucket in buckets)
            return StructuredRun(buckets, limit, sizes * steps, self.virtual).latency

        work = busiest(buckets, sizes, buckets[0].stages // self.virtual)
        seconds = seconds_per_step(simulated, work, self.steps, below)
        if seconds is None:
            return None
        return Arrangement(tuple(tuple(hybrids) for hybrids in grouped), micro_batches, seconds)

    def bound(self, partition: Partition, micro_batches: int) -> float:
        """Seconds that no grouping of these hybrid tasks can beat; infinite if one of them does not fit."""
        self.spent += len(partition)
        costs = self.hybrids(partition, micro_batches)
        return lower_bound(costs, self.steps) if all(fits(cost, self.limit) for cost in costs) else math.inf

    def _bucket(self, hybrids: tuple[Hybrid, ...], micro_batches: int) -> BucketCost:
        key = (hybrids, micro_batches)
        if key not in self._buckets:
            costs = self.hybrids(hybrids, micro_batches)
            if len(costs) > 1 and costs[0].overlap is not None:
                self.spent += _LAUNCHES * len(costs) * costs[0].stages
            self._buckets[key] = bucket_cost(costs)
        return self._buckets[key]
