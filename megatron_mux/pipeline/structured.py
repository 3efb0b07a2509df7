"""The structured multi-bucket 1F1B template (MuxTune section 3.4.1 and appendix A).

Buckets enter in descending order of their first stage's latency, micro-batches of a bucket consecutively; a stage that
is free runs a backward pass if one is ready, else launches the next forward pass, as eagerly as its memory allows. The
order that comes out of this on predicted costs is written down as a template: nothing is decided while it runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megatron_mux.pipeline.action import Action, Unit
from megatron_mux.pipeline.bucket import BucketCost, Sizes, backward_order, forward_order, sizes_of
from megatron_mux.pipeline.template import Template

_TOLERANCE = 1e-9
"""What two sums of the same seconds in another order may differ by, relative to the longest pass."""


def descending(buckets: Sequence[BucketCost]) -> list[int]:
    """Indices of the buckets in the order in which they should enter (rule 1)."""
    return sorted(range(len(buckets)), key=lambda i: (-buckets[i].latency, i))


def structured(
    buckets: Sequence[BucketCost], memory_limit: Sequence[float] | None = None, sizes: Sizes | None = None
) -> Template:
    """The template for these buckets; see `schedule`."""
    return schedule(buckets, memory_limit, sizes)[0]


def schedule(
    buckets: Sequence[BucketCost], memory_limit: Sequence[float] | None = None, sizes: Sizes | None = None
) -> tuple[Template, float]:
    """The template for these buckets and its latency in seconds, the same that `simulate` finds.

    Args:
        buckets: In the order in which they enter; see `descending`.
        memory_limit: `[S]` bytes that a stage may keep between forward and backward passes; None: no limit.
        sizes: The micro-batches that a step really has, if they are not as many or not cut as the costs say; of
            several steps, one after the other: a bucket's step begins when its step before is done on the first stage.

    Returns:
        One list of actions per stage, and seconds. Every stage runs forwards and backwards in one order, and the last
        stage always has a backward to run after a forward: free of deadlock.

    Raises:
        ValueError: A single micro-batch does not fit in a stage's memory, or costs are for different numbers of stages.
    """
    if not buckets:
        return (), 0.0
    stages = buckets[0].stages
    if any(bucket.stages != stages for bucket in buckets):
        raise ValueError(f"buckets have costs for {sorted({b.stages for b in buckets})} stages")
    if memory_limit is not None:
        _check_memory(buckets, memory_limit)
    return _Scheduler(buckets, sizes_of(buckets) if sizes is None else sizes, memory_limit).run()


def _check_memory(buckets: Sequence[BucketCost], memory_limit: Sequence[float]) -> None:
    for i, bucket in enumerate(buckets):
        for stage, limit in enumerate(memory_limit):
            if bucket.micro_batches and bucket.kept(stage) * bucket.chunks > limit:
                raise ValueError(
                    f"one micro-batch of bucket {i} keeps {bucket.kept(stage) * bucket.chunks:.0f} bytes on stage "
                    f"{stage}, which may keep {limit:.0f}: take more micro-batches or fewer tasks together"
                )


@dataclass
class _Stage:
    """Where a stage stands: how many passes it has begun, what it keeps, until when it is busy."""

    forwards: int = 0
    backwards: int = 0
    kept: float = 0.0
    free_at: float = 0.0
    actions: list[Action] = field(default_factory=list)


class _Scheduler:
    """Greedy list scheduling in the order of simulated time."""

    def __init__(
        self, buckets: Sequence[BucketCost], sizes: Sizes, memory_limit: Sequence[float] | None
    ) -> None:
        stages = buckets[0].stages
        self.buckets = buckets
        self.sizes = sizes
        self.last = stages - 1
        self.limit = memory_limit
        self.forward, self.backward = forward_order(sizes), backward_order(sizes)
        self.position = {unit: i for i, unit in enumerate(self.forward)}
        # Backward passes that the first stage has done once a bucket, and all before it, are done.
        self.ends = list(accumulate(sum(own) for own in sizes))
        longest = max((max(*b.forward, *b.backward) for b in buckets), default=0.0)
        self.tolerance = _TOLERANCE * longest
        # When the input of each pass is there: by stage and index into `forward` or `backward`.
        self.hidden: list[list[float]] = [[0.0] * len(self.forward)] + [[] for _ in range(self.last)]
        self.gradient: list[list[float]] = [[] for _ in range(stages)]
        self.stages = [_Stage() for _ in range(stages)]
        self.events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]

    def run(self) -> tuple[Template, float]:
        """Until no stage has anything left to do."""
        while self.events:
            now, stage = heapq.heappop(self.events)
            if self.stages[stage].free_at <= now + self.tolerance:
                self._act(stage, now)
        template = tuple(tuple(stage.actions) for stage in self.stages)
        return template, max(stage.free_at for stage in self.stages)

    def _act(self, number: int, now: float) -> None:
        """Begin what stage `number`, free at `now`, should do next, if anything is ready."""
        stage = self.stages[number]
        if self._is_backward_ready(number, now):
            action = Action.of(number, "B", self.backward[stage.backwards])
        elif self._is_forward_ready(number, now):
            action = Action.of(number, "F", self.forward[stage.forwards])
        else:
            return
        bucket = self._cost(action.bucket)
        stop = now + bucket.seconds(action)
        stage.actions.append(action)
        stage.free_at = stop
        if action.kind == "F":
            stage.forwards += 1
            stage.kept += bucket.kept(number)
            if number < self.last:
                self._send(self.hidden, number + 1, stop, bucket.to_next(number))
        else:
            stage.backwards += 1
            stage.kept -= bucket.kept(number)
            if number > 0:
                self._send(self.gradient, number - 1, stop, bucket.to_next(number - 1))
        heapq.heappush(self.events, (stop, number))

    def _cost(self, bucket: int) -> BucketCost:
        return self.buckets[bucket % len(self.buckets)]

    def _send(self, inputs: list[list[float]], stage: int, start: float, seconds: float) -> None:
        """Let a tensor travel to `stage`: one at a time in each direction of a link."""
        arrived = inputs[stage]
        when = max(start, arrived[-1] if arrived else 0.0) + seconds
        arrived.append(when)
        heapq.heappush(self.events, (when, stage))

    def _is_backward_ready(self, number: int, now: float) -> bool:
        done = self.stages[number].backwards
        if done == len(self.backward):
            return False
        if number < self.last:
            arrived = self.gradient[number]
            return done < len(arrived) and arrived[done] <= now + self.tolerance
        # The loss head is here: a pack's first backward follows its last forward.
        return self._last_of_pack(self.backward[done]) < self.stages[number].forwards

    def _last_of_pack(self, unit: Unit) -> int:
        last = Unit(unit.bucket, unit.micro_batch, self.sizes[unit.bucket][unit.micro_batch] - 1)
        return self.position[last]

    def _is_forward_ready(self, number: int, now: float) -> bool:
        stage = self.stages[number]
        arrived = self.hidden[number]
        if stage.forwards >= len(arrived) or arrived[stage.forwards] > now + self.tolerance:
            return False
        unit = self.forward[stage.forwards]
        before = unit.bucket - len(self.buckets)
        if number == 0 and before >= 0 and stage.backwards < self.ends[before]:
            return False  # the same tasks' step before
        kept = stage.kept + self._cost(unit.bucket).kept(number)
        if self.limit is None or kept <= self.limit[number] * (1 + _TOLERANCE):
            return True
        # A micro-batch that is alone here is finished, whatever it keeps: nothing else could make room for it.
        oldest = self.backward[stage.backwards]
        return (unit.bucket, unit.micro_batch) == (oldest.bucket, oldest.micro_batch)
