"""Random bucket sets, the orders that MuxTune compares, and what no order can beat; see `schedules.py`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.bucket import BucketCost
from megatron_mux.pipeline.structured import descending

Buckets = list[BucketCost]


@dataclass(frozen=True)
class Premise:
    """What holds of a set beyond what always does: micro-batches of a bucket are alike.

    Attributes:
        even: F = B.
        equal: All stages take the same time.
        instant: Nothing takes time between stages.
        roomy: Memory to spare; else a stage keeps as much as the longest micro-batches of one for each stage.
        whole: Micro-batches are one chunk; else two to four.
        steps: That follow each other without a flush.
    """

    even: bool = True
    equal: bool = True
    instant: bool = True
    roomy: bool = True
    whole: bool = True
    steps: int = 1


PREMISES = {
    "the paper's": Premise(),
    "F != B": Premise(even=False),
    "unequal stages": Premise(equal=False),
    "transfer time": Premise(instant=False),
    "memory limited": Premise(roomy=False),
    "chunks": Premise(whole=False),
    "three steps rolled": Premise(steps=3),
    "none of them": Premise(False, False, False, False, False, 3),
}


@dataclass(frozen=True)
class BucketSet:
    """One instance.

    Attributes:
        buckets: In the order in which their jobs came: any.
        memory_limit: `[S]` bytes; None: no limit.
        steps: That follow each other.
    """

    buckets: Buckets
    memory_limit: tuple[float, ...] | None = None
    steps: int = 1

    @property
    def stages(self) -> int:
        """S."""
        return self.buckets[0].stages


def random_set(seed: int, premise: Premise) -> BucketSet:
    """Two to eight buckets of one to six micro-batches on two to eight stages; a pass takes 0.1 to 10.

    The same seed gives the same set under every premise, but for what the premise is about.
    """
    r = random.Random(seed)
    stages = r.randint(2, 8)
    shapes = [(r.uniform(0.1, 10.0), r.randint(1, 6)) for _ in range(r.randint(2, 8))]
    skew = [1.0 if premise.equal else r.uniform(0.7, 1.3) for _ in range(stages)]
    buckets = []
    for seconds, count in shapes:
        ratio = 1.0 if premise.even else r.uniform(0.5, 2.0)
        forward = tuple(seconds * share for share in skew)
        buckets.append(
            BucketCost(
                micro_batches=count,
                forward=forward,
                backward=tuple(ratio * own for own in forward),
                memory=forward,
                transfer=() if premise.instant else (seconds * r.uniform(0.0, 0.5),) * (stages - 1),
            )
        )
    if not premise.whole:
        buckets = [_cut(bucket, r.randint(2, 4)) for bucket in buckets]
    limit = None
    if not premise.roomy:
        limit = tuple(stages * max(b.memory[s] * b.chunks for b in buckets) for s in range(stages))
    return BucketSet(buckets, limit, premise.steps)


def _cut(bucket: BucketCost, chunks: int) -> BucketCost:
    """The same work in so many chunks."""

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


def sorted_down(buckets: Buckets) -> Buckets:
    """The structured template's order."""
    return [buckets[i] for i in descending(buckets)]


def longest_in_the_middle(buckets: Buckets) -> Buckets:
    """Figure 22(e): up to the longest, then down again."""
    down = sorted_down(buckets)
    return down[1::2][::-1] + down[::2]


def varying(spread: float, seed: int) -> Callable[[Action], float]:
    """How many times as long as predicted each action takes: log-normal with this deviation, the same for a seed."""

    def factor(action: Action) -> float:
        return random.Random(f"{seed} {action}").lognormvariate(0.0, spread)

    return factor


def halved_stages(buckets: Buckets) -> Buckets:
    """The same on twice as many stages of half the layers, between which nothing takes time."""

    def halves(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(own / 2 for own in seconds for _ in range(2))

    return [BucketCost(b.micro_batches, halves(b.forward), halves(b.backward), b.chunks) for b in buckets]


def least_latency(case: BucketSet) -> float:
    """Seconds that no order of the same passes can beat: the most that these arguments give.

    - A stage computes all its passes. Before its first, some unit has come through all stages before it; after its
      last, a backward pass, some unit's gradient goes back through them. At best these are the quickest ones.
    - The same holds of a bucket alone, and its next step begins when its step before is done on the first stage: as
      often as there are steps, one after the other.
    - A micro-batch goes through all stages and back. Its other chunks follow the first in the pace of the slowest
      stage, forward; and, since none goes back before the last has arrived, again backward.
    """
    buckets = [bucket for bucket in case.buckets if bucket.micro_batches]
    alone = [max(_through(stage, [bucket]) for stage in range(case.stages)) for bucket in buckets]
    trips = [
        sum(bucket.forward)
        + sum(bucket.backward)
        + 2 * sum(bucket.transfer)
        + (bucket.chunks - 1) * (max(bucket.forward) + max(bucket.backward))
        for bucket in buckets
    ]
    return max(
        *(_through(stage, buckets, case.steps) for stage in range(case.stages)),
        *(case.steps * max(own, trip) for own, trip in zip(alone, trips, strict=True)),
    )


def _through(stage: int, buckets: Sequence[BucketCost], steps: int = 1) -> float:
    """All that a stage computes, after the least that comes before and before the least that comes after."""
    there = min(sum(b.forward[:stage]) + sum(b.transfer[:stage]) for b in buckets)
    back = min(sum(b.backward[:stage]) + sum(b.transfer[:stage]) for b in buckets)
    work = sum(b.micro_batches * b.chunks * (b.forward[stage] + b.backward[stage]) for b in buckets)
    return there + steps * work + back
