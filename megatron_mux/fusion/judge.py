"""Judges layouts by the latency of the pipeline they make, and bounds what they could come to at best.

Equation 6 and equation 7 each look at a surrogate; what is asked here is the whole plan's structured template. Answers
are remembered, and effort is counted, so that whoever searches knows when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.cost import CostModel, Hybrid, HybridCost, bucket_cost, fits, kept_limit, lower_bound
from megatron_mux.fusion.grouping import balanced
from megatron_mux.fusion.hybrid import Partition
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.structured import descending, schedule

_ROUNDING = 1e-12
"""What sums of the same seconds in another order may differ by."""

Array = npt.NDArray[np.float64]


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


class Judge:
    """Latency of layouts, remembered.

    Args:
        model: Costs.
        memory_limit: `[S]` bytes for passes, kept between them and taken in them; None: no limit.
        most_effort: After how much of it, counted from `rest`, the best found so far has to do.
        virtual: Stages of each rank; what one of them may keep is its share of the rank's.
    """

    def __init__(
        self,
        model: CostModel,
        memory_limit: Sequence[float] | None = None,
        most_effort: float = math.inf,
        virtual: int = 1,
    ) -> None:
        self.model = model
        self.limit = memory_limit
        self.virtual = virtual
        ranks = len(memory_limit or ()) // virtual
        self.rank_limit = [sum(memory_limit[rank::ranks]) for rank in range(ranks)] if memory_limit else None
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
        limit = None if self.rank_limit is None else kept_limit(buckets, self.rank_limit)
        if limit is None and self.rank_limit is not None:
            return None
        order = descending(buckets)
        _, latency = schedule([buckets[i] for i in order], limit, virtual=self.virtual)
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
                count,
                cost.forward,
                cost.backward,
                memory=cost.memory,
                working=cost.working,
                transfer=cost.transfer,
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
