"""Random bucket sets, the orders that MuxTune compares, and a lower bound on latency."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.structured import descending

Buckets = list[BucketCost]


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that a random bucket set meets. Micro-batches of a bucket are alike in any case.

    Attributes:
        equal_passes: A forward pass takes as long as its backward pass (F = B).
        equal_stages: All stages take the same time.
        no_transfer_time: Transfers between stages take no time.
        unlimited_memory: Memory is not limited; else a stage can hold its largest micro-batch once per stage.
        single_chunk: A micro-batch is one chunk; else two to four.
        steps: Steps that follow each other without a flush.
    """

    equal_passes: bool = True
    equal_stages: bool = True
    no_transfer_time: bool = True
    unlimited_memory: bool = True
    single_chunk: bool = True
    steps: int = 1


ASSUMPTIONS = {
    "the paper's": Assumptions(),
    "F != B": Assumptions(equal_passes=False),
    "unequal stages": Assumptions(equal_stages=False),
    "transfer time": Assumptions(no_transfer_time=False),
    "memory limited": Assumptions(unlimited_memory=False),
    "chunks": Assumptions(single_chunk=False),
    "three steps rolled": Assumptions(steps=3),
    "none of them": Assumptions(False, False, False, False, False, 3),
}


@dataclass(frozen=True)
class BucketSet:
    """Buckets that share a pipeline, with the memory of its stages.

    Attributes:
        buckets: The buckets, in no particular order.
        memory_limit: Limit of each stage, `[S]` in the unit of the buckets' memory; None for no limit.
        steps: Steps that follow each other without a flush.
    """

    buckets: Buckets
    memory_limit: tuple[float, ...] | None = None
    steps: int = 1

    @property
    def stages(self) -> int:
        """Number of stages S."""
        return self.buckets[0].stages


def random_set(seed: int, assumptions: Assumptions) -> BucketSet:
    """Draw two to eight buckets of one to six micro-batches on two to eight stages; a pass takes 0.1 to 10 seconds.

    Sets of the same seed differ only in what the assumptions ask for.
    """
    r = random.Random(seed)
    stages = r.randint(2, 8)
    shapes = [(r.uniform(0.1, 10.0), r.randint(1, 6)) for _ in range(r.randint(2, 8))]
    skew = [1.0 if assumptions.equal_stages else r.uniform(0.7, 1.3) for _ in range(stages)]
    buckets = []
    for seconds, count in shapes:
        ratio = 1.0 if assumptions.equal_passes else r.uniform(0.5, 2.0)
        forward = tuple(seconds * share for share in skew)
        buckets.append(
            BucketCost(
                micro_batches=count,
                forward=forward,
                backward=tuple(ratio * own for own in forward),
                memory=forward,
                transfer=()
                if assumptions.no_transfer_time
                else (seconds * r.uniform(0.0, 0.5),) * (stages - 1),
            )
        )
    if not assumptions.single_chunk:
        buckets = [_split_into_chunks(bucket, r.randint(2, 4)) for bucket in buckets]
    limit = None
    if not assumptions.unlimited_memory:
        limit = tuple(stages * max(b.memory[s] * b.chunks for b in buckets) for s in range(stages))
    return BucketSet(buckets, limit, assumptions.steps)


def _split_into_chunks(bucket: BucketCost, chunks: int) -> BucketCost:
    """Divide a bucket's micro-batches into chunks; the work stays the same."""

    def part(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(own / chunks for own in seconds)

    return replace(
        bucket,
        forward=part(bucket.forward),
        backward=part(bucket.backward),
        memory=part(bucket.memory),
        transfer=part(bucket.transfer),
        chunks=chunks,
    )


def descending_order(buckets: Buckets) -> Buckets:
    """Sort buckets into the descending order of the structured template."""
    return [buckets[i] for i in descending(buckets)]


def longest_in_the_middle(buckets: Buckets) -> Buckets:
    """Order buckets by length, ascending to the longest in the middle, then descending (figure 22(e))."""
    down = descending_order(buckets)
    return down[1::2][::-1] + down[::2]


def random_variation(spread: float, seed: int) -> Callable[[Action], float]:
    """Return a function from an action to the ratio of its time to the predicted one.

    Ratios are log-normal with the standard deviation `spread`, and the same for the same seed.
    """

    def factor(action: Action) -> float:
        return random.Random(f"{seed} {action}").lognormvariate(0.0, spread)

    return factor


def latency_bound(case: BucketSet) -> float:
    """Return a lower bound on the latency of any order of the passes, in seconds: the largest of these bounds.

    - A stage computes all its passes. Before the first of them, some unit passes through all earlier stages; after the
      last, a backward pass, some unit's gradient passes back through them. At best these are the fastest units.
    - The same holds for each bucket alone, once per step, since a bucket's next step begins when the first stage has
      finished its last one.
    - A micro-batch passes forward and backward through all stages. Its other chunks follow at the pace of the slowest
      stage, forward, and again backward, since no chunk goes back before the last has arrived.
    """
    buckets = [bucket for bucket in case.buckets if bucket.micro_batches]
    alone = [max(_bound_of_stage(stage, [bucket]) for stage in range(case.stages)) for bucket in buckets]
    trips = [
        sum(bucket.forward)
        + sum(bucket.backward)
        + 2 * sum(bucket.transfer)
        + (bucket.chunks - 1) * (max(bucket.forward) + max(bucket.backward))
        for bucket in buckets
    ]
    return max(
        *(_bound_of_stage(stage, buckets, case.steps) for stage in range(case.stages)),
        *(case.steps * max(own, trip) for own, trip in zip(alone, trips, strict=True)),
    )


def _bound_of_stage(stage: int, buckets: Sequence[BucketCost], steps: int = 1) -> float:
    """Time of all passes of a stage, with the shortest possible filling before and draining after them."""
    there = min(sum(b.forward[:stage]) + sum(b.transfer[:stage]) for b in buckets)
    back = min(sum(b.backward[:stage]) + sum(b.transfer[:stage]) for b in buckets)
    work = sum(b.micro_batches * b.chunks * (b.forward[stage] + b.backward[stage]) for b in buckets)
    return there + steps * work + back
