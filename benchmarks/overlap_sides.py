"""The sides of `overlap.py`: ways to compute one step, and how long each is predicted to take."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensor_messages import Sent, TimedPass

from megatron_mux.fusion.launch_order import (
    Chain,
    Interleave,
    LaunchOrder,
    PieceCost,
    best_order,
    encode,
    simulate,
)
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan

SIDES = {
    "a": "one task after another",
    "b": "all tasks in one batch",
    "d": "interleaved, Algorithm 1",
    "e": "interleaved, ours",
    "f": "compute alone",
    "g": "messages alone",
}
"""What each side is; (f) and (g) are (a) without its messages, and its messages."""

GOALS = {"speed_up": ((1 / 2, 1.4), (1 / 3, 1.2)), "of_bound": 0.85, "over_best_of_others": 0.97}
"""What (e) is to reach: its speed-up by the share of messages, largest first."""

Order = Sequence[int]


def one_after_another(names: Sequence[str]) -> Plan:
    """A bucket of as many hybrid tasks as tasks."""
    return _plan(Bucket(tuple(HybridTask((name,)) for name in names), 1))


def in_one_batch(names: Sequence[str]) -> Plan:
    """A bucket of one hybrid task."""
    return _plan(Bucket((HybridTask(tuple(names)),), 1))


def _plan(bucket: Bucket) -> Plan:
    return Plan("auto", 1, (bucket,), tensor=2)


def in_order(plan: Plan, forward: Order, backward: Order) -> Plan:
    """A plan whose hybrid tasks are computed in turns."""
    launch = (LaunchOrder(encode(forward), encode(backward)),)
    return replace(plan, buckets=tuple(replace(bucket, launch=launch) for bucket in plan.buckets))


def in_turn(plan: Plan, layers: int) -> Plan:
    """A plan whose hybrid tasks take turns after each piece, to profile the pieces."""
    order = [i for _ in range(2 * layers + 1) for i in range(len(plan.buckets[0].hybrid_tasks))]
    return in_order(plan, order, order)


@dataclass
class Profile:
    """What is measured before the sides are.

    Attributes:
        compute: Seconds of a step without its messages, by the plan's name.
        sent: The messages of a step, by the plan's name.
        passes: Steps of hybrid tasks in turns without their messages: a forward and a backward pass each.
        seconds: Of each message sent alone.
        share: Part of the processor's time that a message takes while it is on its way.
        costs: The pieces of each hybrid task, in the forward and in the backward pass: the same on all ranks.
    """

    compute: dict[str, float] = field(default_factory=dict)
    sent: dict[str, list[Sent]] = field(default_factory=dict)
    passes: list[tuple[TimedPass, TimedPass]] = field(default_factory=list)
    seconds: dict[Sent, float] = field(default_factory=dict)
    share: float = 0.0
    costs: tuple[list[Chain], list[Chain]] = ([], [])

    def messages(self, sent: Sequence[Sent | None]) -> float:
        """Seconds of messages, one after another."""
        return sum(self.seconds[own] for own in sent if own is not None)

    def chains(self, index: int) -> list[Chain]:
        """The pieces of each hybrid task on this rank, in the forward pass (0) or the backward pass (1)."""
        repeats = zip(*(both[index].pieces for both in self.passes), strict=True)
        found: dict[int, list[PieceCost]] = {}
        for pieces in repeats:
            cost = PieceCost(statistics.median(p.seconds for p in pieces), self.messages([pieces[0].message]))
            found.setdefault(pieces[0].chain, []).append(cost)
        return [found[chain] for chain in sorted(found)]

    def orders(self, interleave: Interleave) -> tuple[list[int], list[int]]:
        """The launch orders, forward and backward."""
        forward, backward = (best_order(chains, interleave, self.share) for chains in self.costs)
        return forward, backward

    def predicted(self, orders: tuple[Order, Order]) -> float:
        """Seconds of a step of hybrid tasks computed in turns."""
        rest = self.compute["turns"] + self.messages(self.sent["turns"])
        simulated = 0.0
        for chains, order in zip(self.costs, orders, strict=True):
            rest -= sum(piece.compute + piece.message for chain in chains for piece in chain)
            simulated += simulate(chains, order, self.share).seconds
        return simulated + rest

    def predicted_in_line(self, name: str) -> float:
        """Seconds of a step whose messages nothing hides."""
        return self.compute[name] + self.messages(self.sent[name])


def figures(
    seconds: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, object]:
    """Calculate medians, speed-ups over (a) in the same turn, the share of messages and the bound.

    Args:
        seconds: Of each side in each turn.
        cpu: For each side and turn, CPU seconds of each rank.
    """
    median = {side: statistics.median(own) for side, own in seconds.items()}
    of_cpu = {side: statistics.median(max(ranks) for ranks in own) for side, own in cpu.items()}
    compute, messages = median["f"], median["g"]
    bound = (compute + messages) / max(compute + of_cpu["g"], messages)
    speed_up = {
        side: statistics.median(a / own for a, own in zip(seconds["a"], seconds[side], strict=True))
        for side in seconds
    }
    plain = [speed_up[side] for side in seconds if side not in ("e", "f", "g")]
    return {
        "median_s": median,
        "median_cpu_s": of_cpu,
        "speed_up": speed_up,
        "share_of_messages": messages / (compute + messages),
        "bound": bound,
        "of_bound": speed_up["e"] / bound,
        "over_best_of_others": speed_up["e"] / max(plain),
    }
