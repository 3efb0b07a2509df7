"""In which order a stage computes the pieces of a bucket's hybrid tasks (MuxTune section 3.4.3, Algorithm 1).

A hybrid task's pass is a chain: each piece computes, then sends a message to the other tensor ranks, and the next piece
needs its result. The stage computes one piece at a time, and its link carries one message at a time, in the order in
which they are issued. So a launch order decides how much of the messages is hidden behind computation.

    0 | attn0 |       | mlp0 | ...            compute:   attn0 attn1 mlp0 mlp1 ...
    1         | attn1 |      | mlp1 | ...     messages:        <-0-> <-1-> <-0-> ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field

Interleave = Literal["off", "kahn", "halves", "auto"]
"""How a stage hides messages of tensor ranks: not at all; pieces of the hybrid tasks of a bucket in the order of
Algorithm 1; each hybrid task split into two halves that hide each other's; or what is predicted to be fastest."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MOST_CHAINS = len(_DIGITS)
"""Hybrid tasks that one bucket may interleave."""

_FEW_LAYERS = 4
"""Layers of a pass that are simulated to price it."""

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]

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

    __pydantic_config__ = ConfigDict(extra="forbid")

    compute: _Seconds
    message: _Seconds = 0.0


Chain = Sequence[PieceCost]
"""The pieces of one hybrid task's pass through a stage, in order."""


class Span(NamedTuple):
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
    """The text of an order.

    Raises:
        ValueError: It is of more than `MOST_CHAINS` hybrid tasks.
    """
    if max(order, default=0) >= MOST_CHAINS:
        raise ValueError(f"a bucket interleaves at most {MOST_CHAINS} hybrid tasks, got {max(order) + 1}")
    return "".join(_DIGITS[index] for index in order)


def decode(text: str) -> list[int]:
    """Inverse of `encode`."""
    return [int(digit, MOST_CHAINS) for digit in text]


class _Stage:
    """A stage and its link, as a launch order is followed."""

    def __init__(self, chains: Sequence[Chain], share: float) -> None:
        self._chains = chains
        self._share = share
        self._clock = self._link_free = 0.0
        self._ready = [0.0] * len(chains)
        self.done = [0] * len(chains)
        self.compute: list[Span] = []
        self.messages: list[Span] = []

    @property
    def open(self) -> list[int]:
        """Chains with pieces left."""
        return [i for i, chain in enumerate(self._chains) if self.done[i] < len(chain)]

    def start(self, index: int) -> float:
        """When the next piece of a chain could begin."""
        return max(self._clock, self._ready[index])

    def launch(self, index: int) -> None:
        """Compute the next piece of a chain, then issue its message."""
        number = self.done[index]
        piece, start = self._chains[index][number], self.start(index)
        # Messages issued so far keep the link busy until `_link_free`, and slow computation down meanwhile.
        busy = max(0.0, self._link_free - start)
        taken = min(piece.compute / (1 - self._share), piece.compute + self._share * busy)
        self._clock = self._ready[index] = start + taken
        self.compute.append(Span(index, number, start, self._clock))
        if piece.message:
            begin = max(self._clock, self._link_free)
            self._ready[index] = self._link_free = begin + piece.message
            self.messages.append(Span(index, number, begin, self._link_free))
        self.done[index] += 1


def simulate(chains: Sequence[Chain], order: Sequence[int], share: float = 0.0) -> Timeline:
    """Follow a launch order.

    Args:
        order: The chain of each piece.
        share: Part of the processor's time that a message takes while it is on its way: computation is slower by it.
    """
    stage = _Stage(chains, share)
    for index in order:
        stage.launch(index)
    return Timeline(tuple(stage.compute), tuple(stage.messages))


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


def list_schedule(
    chains: Sequence[Chain], precedence: Callable[[PieceCost, int], Any], share: float = 0.0
) -> list[int]:
    """Launch what can start first; of several such pieces, that of the least `precedence`, of piece and depth.

    Unlike Algorithm 1 it does not wait for a message while another chain could go on, whatever their depths are.
    """
    stage = _Stage(chains, share)

    def key(chain: int) -> tuple[Any, ...]:
        depth = stage.done[chain]
        return stage.start(chain), precedence(chains[chain][depth], depth), chain

    while open_ := stage.open:
        stage.launch(min(open_, key=key))
    return [span.chain for span in stage.compute]


def _johnson(piece: PieceCost, depth: int) -> tuple[bool, float]:
    """Short pieces before long messages, the shortest first; then long pieces before short messages (Johnson, 1954)."""
    sends = piece.compute < piece.message
    return not sends, piece.compute if sends else -piece.message


_PRECEDENCES: tuple[Callable[[PieceCost, int], Any], ...] = (
    _johnson,
    lambda piece, depth: depth,
    lambda piece, depth: piece.compute,
)
"""The best of these and of Algorithm 1 is held against all orders of small random chains in the tests."""


@dataclass(frozen=True)
class LayerCost:
    """A layer's part of a pass.

    Attributes:
        pieces: What is computed before each of its messages, and that message.
        after: Seconds of computation after the last of them, or of all of it if there is none.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    pieces: tuple[PieceCost, ...]
    after: _Seconds = 0.0

    @property
    def compute(self) -> float:
        """Seconds of its computation."""
        return sum((piece.compute for piece in self.pieces), self.after)

    @property
    def message(self) -> float:
        """Seconds of its messages."""
        return sum(piece.message for piece in self.pieces)


@dataclass(frozen=True)
class PassCost:
    """A pass of one hybrid task through a stage.

    Attributes:
        compute: Seconds of computation in its layers.
        messages: Seconds of its messages.
        kinds: How they are divided within a layer of each kind: dense layers and layers with experts differ. All
            layers of a stage together are stretched to `compute` and `messages`.
        outside: Seconds besides its layers, of embedding and loss head: they are not interleaved.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    compute: _Seconds
    messages: _Seconds
    kinds: tuple[LayerCost, ...]
    outside: _Seconds = 0.0

    def chain(self, layers: Sequence[int], of: Sequence[int]) -> list[PieceCost]:
        """The pieces of some layers.

        Args:
            layers: Their kinds, in the order of the pass.
            of: The kinds of all layers of the stage.
        """
        compute = _scale(self.compute, sum(self.kinds[kind].compute for kind in of))
        message = _scale(self.messages, sum(self.kinds[kind].message for kind in of))
        pieces, before = [], 0.0
        for kind in layers:
            costs = self.kinds[kind]
            for piece in costs.pieces:
                pieces.append(PieceCost(before + piece.compute * compute, piece.message * message))
                before = 0.0
            before += costs.after * compute
        return [*pieces, PieceCost(before)]


def _scale(whole: float, parts: float) -> float:
    return whole / parts if parts else 0.0


@dataclass(frozen=True)
class Overlap:
    """How messages are hidden.

    Attributes:
        stages: `[S]` kinds of the layers of each stage, see `PassCost`.
    """

    interleave: Interleave
    stages: tuple[tuple[int, ...], ...]
    share: float = 0.0

    def seconds(self, passes: Sequence[PassCost], stage: int) -> float:
        """Seconds in which a stage computes these passes, which share a clock."""
        layers = self.stages[stage]
        total = sum(p.outside for p in passes)
        # Layers of one kind after the other: their order does not matter to what is hidden in each.
        for kind in dict.fromkeys(layers):
            total += self._alike(passes, kind, layers)
        return total

    def order(self, passes: Sequence[PassCost], stage: int, backward: bool) -> str:
        """The launch order of these passes through a stage."""
        layers = self.stages[stage][:: -1 if backward else 1]
        chains = [p.chain(layers, layers) for p in passes]
        return encode(best_order(chains, self.interleave, self.share))

    def _alike(self, passes: Sequence[PassCost], kind: int, of: Sequence[int]) -> float:
        """Seconds of the layers of one kind."""
        layers, few, less = of.count(kind), _FEW_LAYERS, _FEW_LAYERS // 2
        if layers <= few:
            return min(self._simulated(passes, [kind] * layers, of))
        # What a layer more takes, in each kind of order, is known after a few.
        seconds, before = (self._simulated(passes, [kind] * count, of) for count in (few, less))
        beyond = (layers - few) / (few - less)
        return min(more + (more - fewer) * beyond for more, fewer in zip(seconds, before, strict=True))

    def _simulated(self, passes: Sequence[PassCost], layers: Sequence[int], of: Sequence[int]) -> list[float]:
        """Seconds of some layers in each of the orders that are tried."""
        chains = [p.chain(layers, of) for p in passes]
        tried = _orders(chains, self.interleave, self.share)
        return [simulate(chains, order, self.share).seconds for order in tried]


def best_order(chains: Sequence[Chain], interleave: Interleave, share: float = 0.0) -> list[int]:
    """The launch order of a bucket."""
    return min(_orders(chains, interleave, share), key=lambda order: simulate(chains, order, share).seconds)


def _orders(chains: Sequence[Chain], interleave: Interleave, share: float) -> Iterator[list[int]]:
    """The launch orders that are tried: equally many for all chains of as many hybrid tasks."""
    if interleave == "off" or len(chains) == 1:
        yield one_after_another(chains)
        return
    yield kahn(chains)
    if interleave == "kahn":
        return
    yield one_after_another(chains)
    longest = sorted(range(len(chains)), key=lambda i: -sum(p.compute + p.message for p in chains[i]))
    yield [index for index in longest for _ in chains[index]]
    yield from (list_schedule(chains, precedence, share) for precedence in _PRECEDENCES)
