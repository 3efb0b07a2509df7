"""The structured multi-bucket 1F1B template (MuxTune section 3.4.1 and appendix A).

Buckets enter in descending order of their latency on the first stage, the micro-batches of a bucket consecutively. A
free stage first launches its `warmup_microbatches`, then runs a backward pass if one is ready, and otherwise launches
the next forward pass, as eagerly as its memory allows. The order that results from predicted costs is the template:
nothing is decided while it runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate

from megatron_mux.pipeline.action import Action, Pass
from megatron_mux.pipeline.bucket import BucketCost, Sizes, backward_order, forward_order, sizes_of
from megatron_mux.pipeline.template import Template

_TOLERANCE = 1e-9
"""Rounding tolerance when times are compared, relative to the longest pass."""


def warmup_microbatches(stages_after: int) -> int:
    """Number of chunks a stage launches before it looks for a backward pass.

    This is twice what fills the later stages when every pass takes exactly its predicted time. 1F1B keeps only that
    many in flight, so every pass that takes longer delays all stages, and the delay is never made up.

    Args:
        stages_after: Number of stages after this one.
    """
    return 1 + 2 * stages_after


def descending(buckets: Sequence[BucketCost]) -> list[int]:
    """Indices of the buckets in the order in which they should enter the pipeline (rule 1)."""
    return sorted(range(len(buckets)), key=lambda i: (-buckets[i].latency, i))


def structured(
    buckets: Sequence[BucketCost],
    memory_limit: Sequence[float] | None = None,
    sizes: Sizes | None = None,
    virtual: int = 1,
) -> Template:
    """The template for these buckets, if any; the arguments are those of `StructuredRun`.

    Returns:
        One list of actions per rank. All stages run forwards in one order and backwards in one order, and the last
        stage always has a backward to run after a forward, so there is no deadlock.
    """
    return StructuredRun(buckets, memory_limit, sizes, virtual).template() if buckets else ()


def _kept(bucket: BucketCost, rank: int, ranks: int) -> float:
    """Bytes that a rank keeps for a chunk, on all its stages together."""
    return sum(bucket.memory[stage] for stage in range(rank, bucket.stages, ranks))


def check_memory(buckets: Sequence[BucketCost], memory_limit: Sequence[float]) -> None:
    """Refuse buckets of which a micro-batch keeps more than a rank may keep.

    Raises:
        ValueError: Says which.
    """
    for i, bucket in enumerate(buckets):
        for rank, limit in enumerate(memory_limit):
            kept = _kept(bucket, rank, len(memory_limit)) * bucket.chunks
            if bucket.micro_batches and kept > limit:
                raise ValueError(
                    f"one micro-batch of bucket {i} keeps {kept:.0f} bytes on rank {rank}, which may keep "
                    f"{limit:.0f}: take more micro-batches or fewer tasks together"
                )


class StructuredRun:
    """A simulated run of the structured template.

    It is greedy list scheduling in simulated time. A rank with several stages serves the oldest chunk first. Chunks are
    counted in forward order and in backward order: a pass is `(kind, stage, number in that order)`.

    Args:
        buckets: At least one, in the order in which they enter; see `descending`.
        memory_limit: Bytes that each rank may keep between forward and backward passes; None for no limit. A
            micro-batch that keeps more is in flight alone.
        sizes: The actual micro-batches and chunks, if they differ from those of the costs; those of several steps one
            after the other. A bucket's step starts when its previous step is done on the first stage.
        virtual: Number of stages on each rank; stage `s` is on rank `s % ranks`.

    Raises:
        ValueError: Costs are for different numbers of stages.
    """

    def __init__(
        self,
        buckets: Sequence[BucketCost],
        memory_limit: Sequence[float] | None = None,
        sizes: Sizes | None = None,
        virtual: int = 1,
    ) -> None:
        stages, period = buckets[0].stages, len(buckets)
        if any(bucket.stages != stages for bucket in buckets):
            raise ValueError(f"buckets have costs for {sorted({b.stages for b in buckets})} stages")
        if stages % virtual:
            raise ValueError(f"{stages} stages cannot be {virtual} to a rank")
        sizes = sizes_of(buckets) if sizes is None else sizes
        self.last = stages - 1
        self.ranks = stages // virtual
        self.own = [range(rank, stages, self.ranks) for rank in range(self.ranks)]
        self.warmups = [warmup_microbatches(self.last - stage) for stage in range(stages)]
        self.limit = memory_limit
        self.buckets = buckets
        self.sizes = sizes
        # For each chunk, in either order: its bucket's cost; the first chunk of its pack and of the next pack; and the
        # number of backward passes up to the end of the same tasks' previous step.
        ends = [0] * period + list(accumulate(map(sum, sizes)))
        self.bucket: list[int] = []
        self.pack: list[int] = []
        self.pack_end: list[int] = []
        self.awaited: list[int] = []
        for entry, micro_batches in enumerate(sizes):
            for chunks in micro_batches:
                first = len(self.bucket)
                self.bucket += [entry % period] * chunks
                self.pack += [first] * chunks
                self.pack_end += [first + chunks] * chunks
                self.awaited += [ends[entry]] * chunks
        self.forward_seconds = [bucket.forward for bucket in buckets]
        self.backward_seconds = [bucket.backward for bucket in buckets]
        self.transfer = [bucket.transfer for bucket in buckets]
        if memory_limit is not None:
            self.kept_by_rank = [[_kept(b, r, self.ranks) for r in range(self.ranks)] for b in buckets]
        longest = max((max(*b.forward, *b.backward) for b in buckets), default=0.0)
        self.tolerance = _TOLERANCE * longest
        # Of each stage: passes begun, and arrival times of the inputs of its passes.
        self.forwards, self.backwards = [0] * stages, [0] * stages
        self.hidden: list[list[float]] = [[0.0] * len(self.bucket), *([] for _ in range(self.last))]
        self.gradient: list[list[float]] = [[] for _ in range(stages)]
        # Of each rank: bytes kept, those of its later stages reserved; when it is free; its passes.
        self.kept = [0.0] * self.ranks
        self.free_at = [0.0] * self.ranks
        self.passes: list[list[tuple[Pass, int, int]]] = [[] for _ in range(self.ranks)]
        self.events: list[tuple[float, int]] = [(0.0, rank) for rank in range(self.ranks)]
        self._run()

    @property
    def latency(self) -> float:
        """Seconds until the last rank is free, the same that `simulate` finds."""
        return max(self.free_at)

    def template(self) -> Template:
        """The passes as actions."""
        orders = {"F": forward_order(self.sizes), "B": backward_order(self.sizes)}
        return tuple(
            tuple(Action.of(stage, kind, orders[kind][number]) for kind, stage, number in passes)
            for passes in self.passes
        )

    def peaks(self) -> list[float]:
        """`[ranks]` most bytes that each rank keeps between forward and backward passes and takes in one of them."""
        moments = []
        for passes in self.passes:
            kept = most = 0.0
            for kind, stage, number in passes:
                bucket = self.buckets[self.bucket[number]]
                size = bucket.memory[stage]
                now = kept + size if kind == "F" else kept
                most = max(most, now + bucket.working[stage])
                kept = now if kind == "F" else kept - size
            moments.append(most)
        return moments

    def _run(self) -> None:
        """Schedule until no rank has anything left to do."""
        events, free_at, tolerance = self.events, self.free_at, self.tolerance
        while events:
            now, rank = heapq.heappop(events)
            if free_at[rank] <= now + tolerance:
                self._next(rank, now)

    def _next(self, rank: int, now: float) -> None:
        """Begin the next pass of a free rank: one of its warm-up, else a backward, else any forward."""
        by = now + self.tolerance
        stages = self.own[rank]
        for stage in stages:
            ahead = self.forwards[stage] - self.backwards[stage]
            if ahead < self.warmups[stage] and self._is_forward_ready(stage, by):
                return self._begin_forward(rank, stage, now)
        for stage in stages:
            if self._is_backward_ready(stage, by):
                return self._begin_backward(rank, stage, now)
        for stage in reversed(stages):
            if self._is_forward_ready(stage, by):
                return self._begin_forward(rank, stage, now)
        return None

    def _begin_forward(self, rank: int, stage: int, now: float) -> None:
        number = self.forwards[stage]
        bucket = self.bucket[number]
        stop = now + self.forward_seconds[bucket][stage]
        self.passes[rank].append(("F", stage, number))
        self.free_at[rank] = stop
        self.forwards[stage] = number + 1
        if stage < self.ranks and self.limit is not None:
            # The rank's later stages included, so that nothing launched gets stuck.
            self.kept[rank] += self.kept_by_rank[bucket][rank]
        if stage < self.last:
            self._send(self.hidden[stage + 1], stage + 1, stop, self.transfer[bucket][stage])
        heapq.heappush(self.events, (stop, rank))

    def _begin_backward(self, rank: int, stage: int, now: float) -> None:
        number = self.backwards[stage]
        bucket = self.bucket[number]
        stop = now + self.backward_seconds[bucket][stage]
        self.passes[rank].append(("B", stage, number))
        self.free_at[rank] = stop
        self.backwards[stage] = number + 1
        if self.limit is not None:
            self.kept[rank] -= self.buckets[bucket].memory[stage]
        if stage > 0:
            self._send(self.gradient[stage - 1], stage - 1, stop, self.transfer[bucket][stage - 1])
        heapq.heappush(self.events, (stop, rank))

    def _send(self, arrived: list[float], stage: int, start: float, seconds: float) -> None:
        """Let a tensor travel to `stage`: one at a time in each direction of a link."""
        when = (max(start, arrived[-1]) if arrived else start) + seconds
        arrived.append(when)
        rank = stage % self.ranks
        if self.free_at[rank] <= when + self.tolerance:  # else it looks when it is free
            heapq.heappush(self.events, (when, rank))

    def _is_backward_ready(self, stage: int, by: float) -> bool:
        number = self.backwards[stage]
        if stage < self.last:
            arrived = self.gradient[stage]
            return number < len(arrived) and arrived[number] <= by
        # The loss head is here: a pack's first backward follows its last forward.
        return number < len(self.bucket) and self.pack_end[number] <= self.forwards[stage]

    def _is_forward_ready(self, stage: int, by: float) -> bool:
        number, arrived = self.forwards[stage], self.hidden[stage]
        if number >= len(arrived) or arrived[number] > by:
            return False
        if stage == 0 and self.backwards[0] < self.awaited[number]:
            return False  # the previous step of the same tasks is not done
        if self.limit is None or stage >= self.ranks:
            return True
        kept = self.kept[stage] + self.kept_by_rank[self.bucket[number]][stage]
        if kept <= self.limit[stage] * (1 + _TOLERANCE):
            return True
        # A micro-batch that is alone in flight goes on, whatever it keeps: nothing else could free memory for it.
        return self.pack[number] == self.pack[self.backwards[stage]]
