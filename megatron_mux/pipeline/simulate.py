"""Simulate a template: when each action runs, how long ranks idle, how much memory they keep.

The simulation follows the executor's rules. A rank runs its actions in order. A pass waits for its input, which leaves
the neighbouring stage when that stage's pass is done and takes the bucket's transfer time, one tensor at a time in each
direction. This is arithmetic only: no process and no device is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_mux.pipeline.action import Action, TimedAction
from megatron_mux.pipeline.bucket import BucketCost, Sizes, sizes_of
from megatron_mux.pipeline.check import TemplateError, check, marked
from megatron_mux.pipeline.template import Template


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        timed: Actions of each rank with their times in seconds.
        kept: Memory of each rank over time, as `(second, bytes)` after every change.
    """

    timed: tuple[tuple[TimedAction, ...], ...]
    kept: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def latency(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max((actions[-1].stop for actions in self.timed if actions), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(timed.stop - timed.start for timed in self.timed[rank])

    def bubble(self, rank: int) -> float:
        """Share of the latency during which a rank is idle."""
        return 1 - self.busy(rank) / self.latency if self.latency else 0.0

    def internal_bubble(self, rank: int) -> float:
        """Seconds during which a rank is idle between its first and its last pass."""
        passes = [timed for timed in self.timed[rank] if timed.action.is_pass]
        if not passes:
            return 0.0
        first, last = passes[0].start, passes[-1].stop
        return last - first - sum(t.stop - t.start for t in self.timed[rank] if first <= t.start < last)

    def peak(self, rank: int) -> float:
        """Peak bytes that a rank keeps between forward and backward passes."""
        return max((size for _, size in self.kept[rank]), default=0.0)


def simulate(
    template: Template,
    buckets: Sequence[BucketCost],
    labels: Sequence[str] | None = None,
    memory_limit: Sequence[float] | None = None,
    sizes: Sizes | None = None,
    vary: Callable[[Action], float] = lambda action: 1.0,
) -> Simulation:
    """Simulate a template.

    Args:
        template: Actions per rank. Stage `s` is on rank `s % ranks`.
        buckets: Costs of the buckets of one step, by the index that actions use.
        labels: Text on each bucket's actions; by default its index.
        memory_limit: Bytes that each rank may keep; None for no limit.
        sizes: The actual micro-batches and chunks, if they differ from those of the costs; those of several steps one
            after the other.
        vary: Factor on the predicted seconds of an action.

    Raises:
        TemplateError: The template is incomplete, breaks an order, exceeds the memory limit or deadlocks; the
            offending cell is marked.
    """
    stages = buckets[0].stages if buckets else len(template)
    virtual = max(1, stages // max(1, len(template)))
    check(template, sizes_of(buckets) if sizes is None else sizes, stages, len(buckets), virtual)
    names = labels or [str(i) for i in range(len(buckets))]
    done: dict[Action, float] = {}
    links: dict[tuple[int, int], float] = {}
    timed: list[list[TimedAction]] = [[] for _ in template]
    waiting = list(range(len(template)))
    while waiting:  # terminates: `check` has excluded deadlocks
        for rank in waiting:
            actions, mine = template[rank], timed[rank]
            while len(mine) < len(actions):
                action = actions[len(mine)]
                arrival = _arrival(action, stages, len(template), buckets, done, links)
                if arrival is None:
                    break
                start = max(arrival, mine[-1].stop if mine else 0.0)
                bucket = action.bucket % len(buckets)
                stop = start + buckets[bucket].seconds(action) * vary(action)
                mine.append(TimedAction(action, start, stop, names[bucket]))
                done[action] = stop
        waiting = [rank for rank in waiting if len(timed[rank]) < len(template[rank])]
    kept = tuple(_kept(actions, buckets) for actions in timed)
    if memory_limit is not None:
        _check_memory(template, timed, buckets, memory_limit)
    return Simulation(tuple(tuple(actions) for actions in timed), kept)


def _arrival(
    action: Action,
    stages: int,
    ranks: int,
    buckets: Sequence[BucketCost],
    done: dict[Action, float],
    links: dict[tuple[int, int], float],
) -> float | None:
    """The time at which an action's input arrives; None if it has not been computed yet."""
    before = action.before(stages, ranks)
    if before is None:
        return 0.0
    sent = done.get(before)
    if sent is None:
        return None
    if before.stage % ranks == action.stage % ranks:
        return sent
    link = (before.stage, action.stage)
    if not action.is_pass:
        # A few numbers: they travel with the pass next to them.
        return max(sent, links.get(link, 0.0))
    # A link carries one tensor at a time in each direction, in the order in which they are received.
    cost = buckets[action.bucket % len(buckets)]
    arrival = max(sent, links.get(link, 0.0)) + cost.to_next(min(link))
    links[link] = arrival
    return arrival


def _kept(actions: Sequence[TimedAction], buckets: Sequence[BucketCost]) -> tuple[tuple[float, float], ...]:
    """Memory after every change: allocated when a forward starts, freed when its backward stops."""
    size, found = 0.0, []
    for timed in actions:
        bytes_ = buckets[timed.action.bucket % len(buckets)].kept(timed.action.stage)
        size += {"F": bytes_, "B": -bytes_}.get(timed.action.kind, 0.0)
        found.append((timed.start if timed.action.kind == "F" else timed.stop, size))
    return tuple(found)


def _check_memory(
    template: Template,
    timed: Sequence[Sequence[TimedAction]],
    buckets: Sequence[BucketCost],
    memory_limit: Sequence[float],
) -> None:
    for rank, actions in enumerate(timed):
        for done, (_, size) in zip(actions, _kept(actions, buckets), strict=True):
            if size > memory_limit[rank] * (1 + 1e-9):
                raise TemplateError(
                    f"rank {rank} keeps {size:.0f} bytes at {done.action}, but may keep {memory_limit[rank]:.0f}\n"
                    f"{marked(template, [done.action])}"
                )
