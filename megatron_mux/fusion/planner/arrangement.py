"""Evaluates arrangements of tasks by the published latency of the pipeline they make, and bounds it from below.

Equations 6 and 7 each minimise a surrogate; the search asks for the latency of the whole plan's template instead.
Answers are remembered, and effort is counted, so that a search can stop within its budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from megatron_mux.fusion.graphs.launch_order import MOST_CHAINS
from megatron_mux.fusion.planner.cost import (
    CostModel,
    Hybrid,
    HybridCost,
    bucket_cost,
    busiest,
    entry_orders,
    fits,
    kept_limit,
    lower_bounds,
    seconds_per_step,
)
from megatron_mux.fusion.planner.grouping import (
    Partition,
    balanced,
    numbers,
)
from megatron_mux.pipeline.bucket import BucketCost, sizes_of
from megatron_mux.pipeline.structured import StructuredRun

_LAUNCHES = 200
"""Pieces of a hybrid task that are launched to price a bucket on a stage: a few layers, both passes, each order."""


Buckets = tuple[tuple[Hybrid, ...], ...]
"""The hybrid tasks of each bucket."""


@dataclass(frozen=True)
class Arrangement:
    """Which tasks are computed together, and when.

    Attributes:
        buckets: The hybrid tasks of each bucket, in the order in which buckets enter the pipeline.
        micro_batches: C.
        latency: Seconds of a step, by the structured template.
    """

    buckets: Buckets
    micro_batches: int
    latency: float


class ArrangementEvaluator:
    """Latencies of arrangements, remembered.

    Args:
        memory_limit: `[S]` bytes that a stage may take for passes, kept between them and taken in them; None: no limit.
        budget: Effort, counted from `renew`, after which the search has to stop.
        virtual: Stages per rank; a stage may keep its share of its rank's limit.
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
        self.spent = 0.0
        self._costs: dict[tuple[Hybrid, int], HybridCost] = {}
        self._buckets: dict[tuple[tuple[Hybrid, ...], int], BucketCost] = {}
        self._at_least: dict[tuple[Buckets, int], float] = {}

    def hybrids(self, sets: Sequence[Hybrid], micro_batches: int) -> list[HybridCost]:
        """The model's answers, the new ones asked for together."""
        new = [tasks for tasks in dict.fromkeys(sets) if (tasks, micro_batches) not in self._costs]
        if new:
            for tasks, cost in zip(new, self.model.hybrids(new, micro_batches), strict=True):
                self._costs[tasks, micro_batches] = cost
        return [self._costs[tasks, micro_batches] for tasks in sets]

    def renew(self, share: float = 1.0) -> None:
        """Begin with this share of the budget."""
        self.spent = (1 - share) * self.budget if self.budget < math.inf else 0.0

    def affordable(self, cost: int) -> int:
        """How many more things of this cost the budget allows."""
        return int(min(1e9, max(0.0, self.budget - self.spent))) // max(1, cost) + 2

    @property
    def is_exhausted(self) -> bool:
        """Whether the budget is spent."""
        return self.spent > self.budget

    def groupings(self, partition: Partition, micro_batches: int) -> Iterator[Buckets]:
        """Ways to put hybrid tasks into buckets: one for each number of buckets, by equation 7.

        Without communication to hide, buckets of several hybrid tasks only make clocks longer, so that one bucket each
        is all there is to try.
        """
        costs = self.hybrids(partition, micro_batches)
        if not any(cost.gains_by_company for cost in costs):
            yield tuple((hybrid,) for hybrid in partition)
            return
        latencies = [cost.forward[0] for cost in costs]
        for count in numbers(len(partition)):
            grouping = balanced(latencies, count)
            yield tuple(tuple(partition[i] for i in bucket) for bucket in grouping)

    def least(self, partitions: Sequence[Sequence[Hybrid]], micro_batches: int) -> list[float]:
        """Seconds that no grouping of each of these partitions can beat; infinite if a hybrid task does not fit."""
        self.spent += sum(map(len, partitions))
        costs = iter(self.hybrids([hybrid for hybrids in partitions for hybrid in hybrids], micro_batches))
        return self._least([list(islice(costs, len(hybrids))) for hybrids in partitions])

    def bound(self, buckets: Buckets, micro_batches: int) -> float:
        """Seconds that no order of these buckets can beat; infinite if one of them does not fit."""
        self.spent += len(buckets)
        if max(map(len, buckets)) > MOST_CHAINS:
            return math.inf
        return self._least([[self._bucket(hybrids, micro_batches) for hybrids in buckets]])[0]

    def _least(self, sets: Sequence[Sequence[BucketCost]]) -> list[float]:
        if not sets:
            return []
        bounds = lower_bounds(sets, self.steps, self.virtual)
        if self.limit is None:
            return bounds
        return [
            bound if all(fits(cost, self.limit) for cost in seconds) else math.inf
            for seconds, bound in zip(sets, bounds, strict=True)
        ]

    def orders(self, buckets: Buckets, micro_batches: int) -> list[Buckets]:
        """Buckets in the entry orders that are worth trying, that of MuxTune's rule 1 first."""
        orders = entry_orders([self._bucket(hybrids, micro_batches) for hybrids in buckets])
        return [tuple(buckets[i] for i in order) for order in orders]

    def latency(self, grouped: Buckets, micro_batches: int, below: float = math.inf) -> Arrangement | None:
        """These buckets, entering in this order; None if they take at least `below`."""
        if self._at_least.get((grouped, micro_batches), -math.inf) >= below:
            return None
        buckets = [self._bucket(hybrids, micro_batches) for hybrids in grouped]
        limit = None if self.rank_limit is None else kept_limit(buckets, self.rank_limit)
        sizes = sizes_of(buckets)

        def simulated(steps: int) -> float:
            self.spent += 2 * steps * sum(bucket.micro_batches * bucket.stages for bucket in buckets)
            return StructuredRun(buckets, limit, sizes * steps, self.virtual).latency

        work = busiest(buckets, sizes, buckets[0].stages // self.virtual)
        # A bucket by itself waits for its own step to end: its steps are alike.
        seconds = seconds_per_step(simulated, work, self.steps if len(buckets) > 1 else 1, below)
        self._at_least[grouped, micro_batches] = below if seconds is None else seconds
        if seconds is None:
            return None
        return Arrangement(grouped, micro_batches, seconds)

    def _bucket(self, hybrids: tuple[Hybrid, ...], micro_batches: int) -> BucketCost:
        key = (hybrids, micro_batches)
        if key not in self._buckets:
            costs = self.hybrids(hybrids, micro_batches)
            if len(costs) > 1 and costs[0].overlap is not None:
                self.spent += _LAUNCHES * len(costs) * costs[0].stages
            self._buckets[key] = bucket_cost(costs)
        return self._buckets[key]
