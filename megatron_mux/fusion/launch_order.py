"""In which order a stage computes the pieces of a bucket's hybrid tasks (MuxTune section 3.4.3, Algorithm 1).

A hybrid task's pass is a chain: each piece computes, then sends a message to the other tensor ranks, and the next piece
needs its result. The stage computes one piece at a time, and its link carries one message at a time, in the order in
which they are issued. So a launch order decides how much of the messages is hidden behind computation.

    0 | attn0 |       | mlp0 | ...            compute:   attn0 attn1 mlp0 mlp1 ...
    1         | attn1 |      | mlp1 | ...     messages:        <-0-> <-1-> <-0-> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

Interleave = Literal["off", "kahn", "halves", "auto"]
"""How a stage hides messages of tensor ranks: not at all; pieces of the hybrid tasks of a bucket in the order of
Algorithm 1; each hybrid task split into two halves that hide each other's; or what is predicted to be fastest."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MOST_CHAINS = len(_DIGITS)
"""Hybrid tasks that one bucket may interleave."""

_FEW_MESSAGES = 8
"""Messages of a pass that are simulated to price it."""

_PERMUTED = 4
"""Chains of which every order of precedence is tried; of more, the longest goes first."""

_Order = Annotated[str, Field(pattern="^[0-9a-z]*$")]


@dataclass(frozen=True)
class LaunchOrder:
    """The order of the pieces of a stage, each piece named by the index of its hybrid task (0-9, then a-z).

    Attributes:
        forward, backward: Of a forward and of a backward pass.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    forward: _Order
    backward: _Order


@dataclass(frozen=True)
class PieceCost:
    """One piece of a chain.

    Attributes:
        compute: Seconds.
        message: Seconds of the message after it; 0: there is none.
    """

    compute: float
    message: float = 0.0


Chain = Sequence[PieceCost]
"""The pieces of one hybrid task's pass through a stage, in order."""


@dataclass(frozen=True)
class Span:
    """Seconds in which a piece is computed, or its message is on its way."""

    chain: int
    piece: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a launch order leads to.

    Attributes:
        compute, messages: In the order in which they begin.
    """

    compute: tuple[Span, ...]
    messages: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Until everything is done."""
        return max((span.end for span in (*self.compute, *self.messages)), default=0.0)


def encode(order: Sequence[int]) -> str:
    """The text of an order."""
    return "".join(_DIGITS[index] for index in order)


def decode(text: str) -> list[int]:
    """Inverse of `encode`."""
    return [_DIGITS.index(digit) for digit in text]


def simulate(chains: Sequence[Chain], order: Sequence[int], share: float = 0.0) -> Timeline:
    """Follow a launch order.

    Args:
        chains: Of the hybrid tasks.
        order: The chain of each piece.
        share: Part of the processor's time that a message takes while it is on its way: computation is slower by it.
    """
    clock, link_free = 0.0, 0.0
    done = [0] * len(chains)
    ready = [0.0] * len(chains)
    compute: list[Span] = []
    messages: list[Span] = []
    for index in order:
        piece = chains[index][done[index]]
        start = max(clock, ready[index])
        # Messages issued so far keep the link busy until `link_free`.
        clock = start + _slowed(piece.compute, max(0.0, link_free - start), share)
        compute.append(Span(index, done[index], start, clock))
        ready[index] = clock
        if piece.message:
            begin = max(clock, link_free)
            ready[index] = link_free = begin + piece.message
            messages.append(Span(index, done[index], begin, link_free))
        done[index] += 1
    return Timeline(tuple(compute), tuple(messages))


def _slowed(compute: float, busy: float, share: float) -> float:
    """Seconds of a computation that begins with the link busy for `busy` seconds; see `simulate`."""
    return min(compute / (1 - share), compute + share * busy)


def one_after_another(chains: Sequence[Chain]) -> list[int]:
    """No overlap: each hybrid task's pass at once."""
    return [index for index, chain in enumerate(chains) for _ in chain]


def kahn(chains: Sequence[Chain]) -> list[int]:
    """Algorithm 1: of the pieces whose predecessors are launched, those of least depth; of these the longest."""
    done = [0] * len(chains)
    order: list[int] = []
    while open_ := [i for i, chain in enumerate(chains) if done[i] < len(chain)]:
        depth = min(done[i] for i in open_)
        index = max((i for i in open_ if done[i] == depth), key=lambda i: (chains[i][depth].compute, -i))
        done[index] += 1
        order.append(index)
    return order


def list_schedule(chains: Sequence[Chain], precedence: Sequence[int], share: float = 0.0) -> list[int]:
    """Launch what can start first; of several such pieces, that of the chain that takes precedence.

    Unlike Algorithm 1 it does not wait for a message while another chain could go on, whatever their depths are.
    """
    rank = {chain: place for place, chain in enumerate(precedence)}
    clock, link_free = 0.0, 0.0
    done = [0] * len(chains)
    ready = [0.0] * len(chains)
    order: list[int] = []
    while open_ := [i for i, chain in enumerate(chains) if done[i] < len(chain)]:
        index = min(open_, key=lambda i: (max(clock, ready[i]), rank[i]))
        piece = chains[index][done[index]]
        clock = max(clock, ready[index]) + piece.compute
        ready[index] = clock
        if piece.message:
            ready[index] = link_free = max(clock, link_free) + piece.message
        done[index] += 1
        order.append(index)
    return order


@dataclass(frozen=True)
class Overlap:
    """How messages are hidden.

    Attributes:
        interleave: How launch orders are chosen.
        messages: `[S]` messages in a forward pass through each stage.
        share: See `simulate`.
    """

    interleave: Interleave
    messages: tuple[int, ...]
    share: float = 0.0

    def chains(self, passes: Sequence[tuple[float, float]], count: int) -> list[list[PieceCost]]:
        """Chains of passes whose computation and messages are spread evenly.

        Args:
            passes: Seconds of computation and of messages of each.
            count: Messages of a pass.
        """
        return [
            [*([PieceCost(compute / count, messages / count)] * count), PieceCost(0.0)]
            for compute, messages in passes
        ]

    def seconds(self, passes: Sequence[tuple[float, float]], stage: int) -> float:
        """Seconds in which a stage computes these passes, which share a clock.

        Args:
            passes: As in `chains`, of the whole stage.
            stage: Which.
        """
        count = self.messages[stage]
        if count <= _FEW_MESSAGES:
            return self._simulated(passes, count)
        # All layers are alike: what a layer more takes is known after a few.
        few, less = _FEW_MESSAGES, _FEW_MESSAGES // 2
        parts = [(compute * few / count, messages * few / count) for compute, messages in passes]
        halved = [(compute * less / few, messages * less / few) for compute, messages in parts]
        begun = self._simulated(parts, few)
        return begun + (count - few) * (begun - self._simulated(halved, less)) / (few - less)

    def order(self, passes: Sequence[tuple[float, float]], count: int) -> str:
        """The launch order of passes with so many messages each."""
        return encode(best_order(self.chains(passes, count), self.interleave, self.share))

    def _simulated(self, passes: Sequence[tuple[float, float]], count: int) -> float:
        chains = self.chains(passes, count)
        return simulate(chains, best_order(chains, self.interleave, self.share), self.share).seconds


def best_order(chains: Sequence[Chain], interleave: Interleave, share: float = 0.0) -> list[int]:
    """The launch order of a bucket.

    Args:
        chains: Of its hybrid tasks.
        interleave: See `Interleave`.
        share: See `simulate`.
    """
    if interleave == "off" or len(chains) == 1:
        return one_after_another(chains)
    found = kahn(chains)
    if interleave == "kahn":
        return found
    longest = sorted(
        range(len(chains)), key=lambda i: -sum(piece.compute + piece.message for piece in chains[i])
    )
    tried = permutations(longest) if len(chains) <= _PERMUTED else [longest, longest[::-1]]
    candidates = [
        found,
        one_after_another(chains),
        *(list_schedule(chains, precedence, share) for precedence in tried),
    ]
    return min(candidates, key=lambda order: simulate(chains, order, share).seconds)
