"""The structured multi-bucket 1F1B template (MuxTune section 3.4.1 and appendix A).

Buckets enter in descending order of their latency on the first stage, the micro-batches of a bucket consecutively. A
free stage first builds up its `lead`, then runs a backward pass if one is ready, and otherwise launches the next
forward pass, as eagerly as its memory allows. The order that results from predicted costs is the template: nothing is
decided while it runs.
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
"""Rounding tolerance when times are compared, relative to the longest pass."""


def lead(behind: int) -> int:
    """Number of units a stage launches before it looks for a backward pass.

    This is twice what fills the later stages when every pass takes exactly its predicted time. 1F1B keeps only that
    many in flight, so every pass that takes longer delays all stages, and the delay is never made up: see "passes that
    take longer or shorter than predicted" in `benchmarks/results/schedules.md`.

    Args:
        behind: Number of stages after this one.
    """
    return 1 + 2 * behind


def descending(buckets: Sequence[BucketCost]) -> list[int]:
    """Indices of the buckets in the order in which they should enter the pipeline (rule 1)."""
    return sorted(range(len(buckets)), key=lambda i: (-buckets[i].latency, i))


def structured(
    buckets: Sequence[BucketCost],
    memory_limit: Sequence[float] | None = None,
    sizes: Sizes | None = None,
    virtual: int = 1,
) -> Template:
    """The template for these buckets; see `schedule`."""
    return schedule(buckets, memory_limit, sizes, virtual)[0]


def schedule(
    buckets: Sequence[BucketCost],
    memory_limit: Sequence[float] | None = None,
    sizes: Sizes | None = None,
    virtual: int = 1,
) -> tuple[Template, float]:
    """The template for these buckets and its latency in seconds, the same that `simulate` finds.

    Args:
        buckets: In the order in which they enter; see `descending`.
        memory_limit: Bytes that each rank may keep between forward and backward passes; None for no limit.
        sizes: The actual micro-batches and chunks, if they differ from those of the costs; those of several steps one
            after the other. A bucket's step starts when its previous step is done on the first stage.
        virtual: Number of stages on each rank; stage `s` is on rank `s % ranks`.

    Returns:
        One list of actions per rank, and the latency. All stages run forwards in one order and backwards in one order,
        and the last stage always has a backward to run after a forward, so there is no deadlock.

    Raises:
        ValueError: A single micro-batch does not fit in a rank's memory, or costs are for different numbers of stages.
    """
    if not buckets:
        return (), 0.0
    stages = buckets[0].stages
    if any(bucket.stages != stages for bucket in buckets):
        raise ValueError(f"buckets have costs for {sorted({b.stages for b in buckets})} stages")
    if stages % virtual:
        raise ValueError(f"{stages} stages cannot be {virtual} to a rank")
    if memory_limit is not None:
        _check_memory(buckets, memory_limit)
    return _Scheduler(buckets, sizes_of(buckets) if sizes is None else sizes, memory_limit, virtual).run()


def _kept(bucket: BucketCost, rank: int, ranks: int) -> float:
    """Bytes that a rank keeps for a chunk, on all its stages together."""
    return sum(bucket.kept(stage) for stage in range(rank, bucket.stages, ranks))


def _check_memory(buckets: Sequence[BucketCost], memory_limit: Sequence[float]) -> None:
    for i, bucket in enumerate(buckets):
        for rank, limit in enumerate(memory_limit):
            kept = _kept(bucket, rank, len(memory_limit)) * bucket.chunks
            if bucket.micro_batches and kept > limit:
                raise ValueError(
                    f"one micro-batch of bucket {i} keeps {kept:.0f} bytes on rank {rank}, which may keep "
                    f"{limit:.0f}: take more micro-batches or fewer tasks together"
                )


@dataclass
class _Stage:
    """Counts of the passes a stage has started, and arrival times of the inputs of its next passes."""

    forwards: int = 0
    backwards: int = 0
    hidden: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)


@dataclass
class _Rank:
    """State of a rank: bytes kept (including those reserved for its later stages) and when it becomes free."""

    kept: float = 0.0
    free_at: float = 0.0
    actions: list[Action] = field(default_factory=list)


class _Scheduler:
    """Greedy list scheduling in simulated time. A rank with several stages serves the oldest unit first."""

    def __init__(
        self, buckets: Sequence[BucketCost], sizes: Sizes, memory_limit: Sequence[float] | None, virtual: int
    ) -> None:
        stages = buckets[0].stages
        self.buckets = buckets
        self.sizes = sizes
        self.last = stages - 1
        self.ranks = stages // virtual
        self.limit = memory_limit
        self.forward, self.backward = forward_order(sizes), backward_order(sizes)
        self.position = {unit: i for i, unit in enumerate(self.forward)}
        # Number of backward passes on the first stage once a bucket, and all buckets before it, are done.
        self.ends = list(accumulate(sum(own) for own in sizes))
        longest = max((max(*b.forward, *b.backward) for b in buckets), default=0.0)
        self.tolerance = _TOLERANCE * longest
        self.stages = [_Stage() for _ in range(stages)]
        self.stages[0].hidden = [0.0] * len(self.forward)
        self.busy = [_Rank() for _ in range(self.ranks)]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(self.ranks)]

    def run(self) -> tuple[Template, float]:
        """Schedule until no rank has anything left to do."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.busy[rank].free_at <= now + self.tolerance:
                action = self._next(rank, now)
                if action is not None:
                    self._begin(action, now)
        template = tuple(tuple(rank.actions) for rank in self.busy)
        return template, max(rank.free_at for rank in self.busy)

    def _next(self, rank: int, now: float) -> Action | None:
        """The next action of a free rank: a forward that builds its lead, else a backward, else any forward."""
        own = range(rank, self.last + 1, self.ranks)
        for number in own:
            stage = self.stages[number]
            if stage.forwards - stage.backwards < lead(self.last - number) and self._is_forward_ready(
                number, now
            ):
                return Action.of(number, "F", self.forward[stage.forwards])
        for number in own:
            if self._is_backward_ready(number, now):
                return Action.of(number, "B", self.backward[self.stages[number].backwards])
        for number in reversed(own):
            if self._is_forward_ready(number, now):
                return Action.of(number, "F", self.forward[self.stages[number].forwards])
        return None

    def _begin(self, action: Action, now: float) -> None:
        number, bucket = action.stage, self._cost(action.bucket)
        stage, rank = self.stages[number], self.busy[number % self.ranks]
        stop = now + bucket.seconds(action)
        rank.actions.append(action)
        rank.free_at = stop
        if action.kind == "F":
            stage.forwards += 1
            if (
                number < self.ranks
            ):  # with room for the rank's later stages, so that nothing launched gets stuck
                rank.kept += _kept(bucket, number, self.ranks)
            if number < self.last:
                self._send(self.stages[number + 1].hidden, number + 1, stop, bucket.to_next(number))
        else:
            stage.backwards += 1
            rank.kept -= bucket.kept(number)
            if number > 0:
                self._send(self.stages[number - 1].gradient, number - 1, stop, bucket.to_next(number - 1))
        heapq.heappush(self.events, (stop, number % self.ranks))

    def _cost(self, bucket: int) -> BucketCost:
        return self.buckets[bucket % len(self.buckets)]

    def _send(self, arrived: list[float], stage: int, start: float, seconds: float) -> None:
        """Let a tensor travel to `stage`: one at a time in each direction of a link."""
        when = max(start, arrived[-1] if arrived else 0.0) + seconds
        arrived.append(when)
        heapq.heappush(self.events, (when, stage % self.ranks))

    def _is_backward_ready(self, number: int, now: float) -> bool:
        stage = self.stages[number]
        if stage.backwards == len(self.backward):
            return False
        if number < self.last:
            arrived = stage.gradient
            return stage.backwards < len(arrived) and arrived[stage.backwards] <= now + self.tolerance
        # The loss head is here: a pack's first backward follows its last forward.
        return self._last_of_pack(self.backward[stage.backwards]) < stage.forwards

    def _last_of_pack(self, unit: Unit) -> int:
        last = Unit(unit.bucket, unit.micro_batch, self.sizes[unit.bucket][unit.micro_batch] - 1)
        return self.position[last]

    def _is_forward_ready(self, number: int, now: float) -> bool:
        stage = self.stages[number]
        if stage.forwards >= len(stage.hidden) or stage.hidden[stage.forwards] > now + self.tolerance:
            return False
        unit = self.forward[stage.forwards]
        before = unit.bucket - len(self.buckets)
        if number == 0 and before >= 0 and stage.backwards < self.ends[before]:
            return False  # the previous step of the same tasks is not done
        if self.limit is None or number >= self.ranks:
            return True
        kept = self.busy[number].kept + _kept(self._cost(unit.bucket), number, self.ranks)
        if kept <= self.limit[number] * (1 + _TOLERANCE):
            return True
        # A micro-batch that is alone in flight must finish, whatever it keeps: nothing else could free memory for it.
        oldest = self.backward[stage.backwards]
        return (unit.bucket, unit.micro_batch) == (oldest.bucket, oldest.micro_batch)
