"""The sides of `overlap.py`: ways to compute one step, and how long each is predicted to take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tensor_messages import Sent, TimedPass

from megatron_mux.fusion.graphs.launch_order import (
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
    "c": "one batch split in two",
    "d": "interleaved, Algorithm 1",
    "e": "ours: what is predicted to be fastest",
    "f": "compute alone",
    "g": "messages alone",
}
"""What each side is; (f) and (g) are (a) without its messages, and its messages."""

IN_TURNS: tuple[tuple[str, str, Interleave], ...] = (
    ("c", "halves", "kahn"),
    ("d", "tasks", "kahn"),
)
"""Sides that compute batches in turns: which batches, and in what order. (e) takes either in
the order of `best_order`, or (b): whatever is predicted to be fastest."""

GOALS = {"speed_up": ((1 / 2, 1.4), (1 / 3, 1.2)), "of_bound": 0.85, "over_best_of_others": 0.97}
"""What (e) is to reach: its speed-up by the share of messages, largest first."""

Order = Sequence[int]
Orders = tuple[Order, Order]
"""Forward and backward."""


def one_after_another(names: Sequence[str]) -> Plan:
    """A bucket of as many hybrid tasks as tasks."""
    return _plan(Bucket(tuple(HybridTask((name,)) for name in names), 1))


def in_one_batch(names: Sequence[str]) -> Plan:
    """A bucket of one hybrid task."""
    return _plan(Bucket((HybridTask(tuple(names)),), 1))


def in_halves(plan: Plan) -> Plan:
    """A plan whose hybrid tasks are each computed in two halves."""
    return replace(plan, buckets=tuple(replace(bucket, halves=True) for bucket in plan.buckets))


def _plan(bucket: Bucket) -> Plan:
    return Plan("auto", 1, (bucket,), tensor=2)


def in_order(plan: Plan, forward: Order, backward: Order) -> Plan:
    """A plan whose hybrid tasks are computed in turns."""
    launch = (LaunchOrder(encode(forward), encode(backward)),)
    return replace(plan, buckets=tuple(replace(bucket, launch=launch) for bucket in plan.buckets))


def in_turn(plan: Plan, layers: int) -> Plan:
    """A plan whose hybrid tasks take turns after each piece, to profile the pieces."""
    order = [i for _ in range(2 * layers + 1) for i in range(plan.buckets[0].batches)]
    return in_order(plan, order, order)


@dataclass
class PlanTimes:
    """What is measured of a plan before the sides are.

    Attributes:
        compute: Seconds of a step without its messages.
        sent: The messages of a step.
        passes: The pieces of such steps, where batches take turns: a forward and a backward pass each.
    """

    compute: float
    sent: list[Sent]
    passes: list[tuple[TimedPass, TimedPass]]


@dataclass
class MessageCosts:
    """What messages take.

    Attributes:
        alone: Seconds of a message of each size while nothing is computed.
        beside: The same beside computation.
        share: Part of the processor's time that a message takes from computation while it is on its way.
    """

    alone: dict[Sent, float] = field(default_factory=dict)
    beside: dict[Sent, float] = field(default_factory=dict)
    share: float = 0.0

    def seconds(self, sent: Sequence[Sent]) -> float:
        """Seconds of messages that nothing hides."""
        return sum(self.alone[own] for own in sent)


@dataclass
class ChainTimes:
    """Seconds of the pieces and messages of batches that take turns; predicts their steps.

    Attributes:
        costs: Of messages.
        chains: The pieces of each batch, in the forward and in the backward pass; the same on all ranks.
        rest: Seconds of what is neither.
        waits: Seconds by which pieces take longer since each ends with the slowest rank.
    """

    costs: MessageCosts
    chains: tuple[list[Chain], list[Chain]]
    rest: float
    waits: float

    @classmethod
    def of(
        cls, profile: PlanTimes, costs: MessageCosts, slowest: Callable[[list[float]], list[float]]
    ) -> ChainTimes:
        """From a profile.

        Args:
            profile: Of a plan whose batches take turns.
            costs: Of messages.
            slowest: Returns the largest of each value over ranks.
        """
        forward, backward = (
            cls._chains([both[i] for both in profile.passes], costs, slowest) for i in (0, 1)
        )
        inside = [own.message for one in profile.passes[0] for own in one.pieces if own.message is not None]
        own_pieces = [sum(p.seconds for one in both for p in one.pieces) for both in profile.passes]
        (rest,) = slowest([profile.compute - statistics.median(own_pieces)])
        (all_pieces,) = slowest([statistics.median(own_pieces)])
        waits = sum(piece.compute for chain in (*forward, *backward) for piece in chain) - all_pieces
        rest += costs.seconds(profile.sent) - costs.seconds(inside)
        return cls(costs, (forward, backward), rest, waits)

    @staticmethod
    def _chains(
        repeats: Sequence[TimedPass], costs: MessageCosts, slowest: Callable[[list[float]], list[float]]
    ) -> list[Chain]:
        # A piece ends when the slowest rank has computed it: its message is for all.
        seconds = [slowest([piece.seconds for piece in one.pieces]) for one in repeats]
        found: dict[int, list[PieceCost]] = {}
        for piece, own in zip(repeats[0].pieces, zip(*seconds, strict=True), strict=True):
            message = 0.0 if piece.message is None else costs.beside[piece.message]
            found.setdefault(piece.chain, []).append(PieceCost(statistics.median(own), message))
        return [found[chain] for chain in sorted(found)]

    def to_json(self) -> list[list[list[tuple[float, float]]]]:
        """Forward and backward, for each batch, seconds of each piece and of its message, to the microsecond."""
        return [
            [[(round(piece.compute, 6), round(piece.message, 6)) for piece in chain] for chain in both]
            for both in self.chains
        ]

    def orders(self, interleave: Interleave) -> Orders:
        """The launch orders, forward and backward."""
        forward, backward = (best_order(own, interleave, self.costs.share) for own in self.chains)
        return forward, backward

    def predicted(self, orders: Orders, compute: float = 1.0, messages: float = 1.0) -> float:
        """Seconds of a step, on a machine that takes so many times as long to compute and to send."""

        def taken(chains: Sequence[Chain], order: Order) -> float:
            slower = [[PieceCost(compute * p.compute, messages * p.message) for p in own] for own in chains]
            return simulate(slower, order, self.costs.share).seconds

        return compute * self.rest + sum(map(taken, self.chains, orders))


@dataclass
class Forecast:
    """Predicts the seconds of sides (a) to (e).

    Attributes:
        plain: What was measured of (a) and (b).
        turns: Of batches that take turns, by name: tasks, halves.
        orders: Of sides (c), (d) and (e), unless that is (b): which batches take turns, and in what order.
    """

    plain: Mapping[str, PlanTimes]
    turns: Mapping[str, ChainTimes]
    orders: dict[str, tuple[str, Orders]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side, name, interleave in IN_TURNS:
            self.orders[side] = name, self.turns[name].orders(interleave)
        ours = {name: own.orders("auto") for name, own in self.turns.items()}
        predicted = {name: own.predicted(ours[name]) for name, own in self.turns.items()}
        fastest = min(predicted, key=lambda name: predicted[name])
        if predicted[fastest] < self.seconds()["b"]:
            self.orders["e"] = fastest, ours[fastest]

    def seconds(self, compute: float = 1.0, messages: float = 1.0) -> dict[str, float]:
        """Of a step by each side, on a machine that takes so many times as long to compute and to send."""
        found = {}
        for side, like in (("a", "tasks"), ("b", "halves")):
            own, turns = self.plain[side], self.turns[like]
            found[side] = compute * (own.compute + turns.waits) + messages * turns.costs.seconds(own.sent)
        for side, (name, orders) in self.orders.items():
            found[side] = self.turns[name].predicted(orders, compute, messages)
        return {"e": found["b"], **found}


def figures(
    seconds: Mapping[str, Sequence[float]],
    cpu: Mapping[str, Sequence[Sequence[float]]],
    share: float,
    predicted: Mapping[str, float],
) -> dict[str, object]:
    """Calculate medians, speed-ups over (a) in the same turn, the share of messages and the bound.

    Args:
        seconds: Of each side in each turn.
        cpu: For each side and turn, CPU seconds of each rank.
        share: By how much messages slow computation beside them. CPU seconds of (g) do not count what the kernel does
            for messages while the processor is idle.
        predicted: Seconds of sides (a) to (e).
    """
    median = {side: statistics.median(own) for side, own in seconds.items()}
    of_cpu = {side: statistics.median(max(ranks) for ranks in own) for side, own in cpu.items()}
    compute, messages = median["f"], median["g"]
    bound = (compute + messages) / max(compute + of_cpu["g"], messages)
    speed_up = {
        side: statistics.median(a / own for a, own in zip(seconds["a"], seconds[side], strict=True))
        for side in seconds
    }
    fastest = min(predicted, key=lambda side: predicted[side])
    plain = [speed_up[side] for side in "abcd"]
    return {
        "median_s": median,
        "median_cpu_s": of_cpu,
        "speed_up": speed_up,
        "share_of_messages": messages / (compute + messages),
        "bound": bound,
        "of_bound": speed_up["e"] / bound,
        "bound_with_kernel": (compute + messages) / max(compute + share * messages, messages),
        "over_best_of_others": speed_up["e"] / max(plain),
        "predicted_fastest": fastest,
        "predicted_fastest_over_best": speed_up[fastest] / max(speed_up[side] for side in predicted),
    }
