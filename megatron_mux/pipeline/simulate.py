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
from megatron_mux.pipeline.check import check
from megatron_mux.pipeline.template import Template


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        timed: Actions of each rank with their times in seconds.
        peaks: Most bytes that each rank keeps between forward and backward passes and takes in one of them.
    """

    timed: tuple[tuple[TimedAction, ...], ...]
    peaks: tuple[float, ...]

    @property
    def latency(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return max((actions[-1].stop for actions in self.timed if actions), default=0.0)


def simulate(
    template: Template,
    buckets: Sequence[BucketCost],
    labels: Sequence[str] | None = None,
    sizes: Sizes | None = None,
    vary: Callable[[Action], float] = lambda action: 1.0,
) -> Simulation:
    """Simulate a template.

    Args:
        template: Actions per rank. Stage `s` is on rank `s % ranks`.
        buckets: Costs of the buckets of one step, by the index that actions use.
        labels: Text on each bucket's actions; by default its index.
        sizes: The actual micro-batches and chunks, if they differ from those of the costs; those of several steps one
            after the other.
        vary: Factor on the predicted seconds of an action.

    Raises:
        TemplateError: The template is incomplete, breaks an order or deadlocks; the
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
    peaks = tuple(_peak(actions, buckets) for actions in timed)
    return Simulation(tuple(tuple(actions) for actions in timed), peaks)


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
    arrival = max(sent, links.get(link, 0.0)) + cost.transfer[min(link)]
    links[link] = arrival
    return arrival


def _peak(actions: Sequence[TimedAction], buckets: Sequence[BucketCost]) -> float:
    """Bytes are taken when a forward pass starts and freed when its backward pass stops."""
    size = most = 0.0
    for action in (timed.action for timed in actions if timed.action.is_pass):
        bucket = buckets[action.bucket % len(buckets)]
        kept = bucket.memory[action.stage]
        size += kept * (action.kind == "F")
        most = max(most, size + bucket.working[action.stage])
        size -= kept * (action.kind == "B")
    return most
