"""What the server keeps of a forward pass until its gradients come, and what memory that reserves (Menos, Figure 3).

| policy | the forward pass | while the client answers | the backward pass |
|---|---|---|---|
| `on-demand` | without a graph | its input (d) | with a graph |
| `preserve` | with a graph | M_b (b) | |
| `auto` | one of these, or with a graph in host memory, for each request | | |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_mux.split.server.session_memory import Memory

PolicyName = Literal["on-demand", "auto", "preserve"]
POLICIES: tuple[PolicyName, ...] = ("on-demand", "auto", "preserve")

Keeping = Literal["input", "graph", "graph in host memory"]


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward pass is computed that has a backward.

    Attributes:
        keeps: What stays until the backward; without a graph, the forward pass is computed again.
        size: Bytes to reserve for it.
        kept: Bytes of them that stay reserved until the backward has been computed.
        backward: Bytes to reserve for the backward, on top of what is kept.
    """

    keeps: Keeping
    size: int
    kept: int
    backward: int


@dataclass(frozen=True)
class Offer:
    """What keeping a graph would save a session.

    Attributes:
        size: Bytes that it reserves.
        answer_s: How long: from a forward pass's reply to its gradients.
        reforward_s: How long the forward pass takes that it saves.
    """

    size: int
    answer_s: float
    reforward_s: float


@dataclass(frozen=True)
class Circumstances:
    """What `auto` decides by.

    Attributes:
        free: Bytes that nobody has reserved.
        waits: Whether a request waits for memory.
        largest: Bytes of the largest backward pass of any other session.
        answer_s: How long this client takes from a forward pass's reply to its gradients; 0: not known yet.
        reforward_s: How long a forward pass of this request takes.
        host_rate: Bytes a second between the device and host memory; 0: they are the same memory.
        others: Of the other sessions that keep no graph now.
    """

    free: int
    waits: bool
    largest: int
    answer_s: float
    reforward_s: float
    host_rate: float = 0.0
    others: Sequence[Offer] = ()

    def cost(self, size: int) -> float:
        """Seconds of other sessions' second forward passes that come of keeping so many bytes for this client.

        Bytes times seconds, at the price of what the others would save with them, as far as their graphs would not
        fit beside these bytes and the largest backward pass.
        """
        theirs = sum(offer.size for offer in self.others)
        kept = sum(offer.size * offer.answer_s for offer in self.others)
        if not kept:
            return 0.0
        missing = min(max(0, theirs + self.largest + size - self.free), theirs)
        price = sum(offer.reforward_s for offer in self.others) / kept
        return size * self.answer_s * price * missing / theirs


def again(memory: Memory, rows: int) -> ForwardPlan:
    """Keep the input alone: the forward pass is computed again with its backward (the paper's default)."""
    hidden = memory.scaled(memory.hidden, rows)
    return ForwardPlan("input", memory.forward_of(rows) + hidden, hidden, memory.backward_of(rows))


def plan_forward(policy: PolicyName, memory: Memory, rows: int, now: Circumstances) -> ForwardPlan:
    """Plan a forward pass.

    `auto` keeps the graph if nobody waits for memory, every other session's backward pass still fits beside it, and it
    saves more seconds than it costs the others (`Circumstances.cost`): a client that answers late leaves the memory to
    those that answer soon. Else the graph goes to host memory if it can go there and come back while the client
    answers, in less time than the second forward pass takes. Else only the input is kept.

    Args:
        now: See `Circumstances`; only `auto` looks at it.
    """
    backward, hidden = memory.backward_of(rows), memory.scaled(memory.hidden, rows)
    if policy == "on-demand":
        return again(memory, rows)
    fits = not now.waits and now.free - backward >= now.largest
    if policy == "preserve" or (fits and now.cost(backward) <= now.reforward_s):
        return ForwardPlan("graph", backward, backward, 0)
    there_and_back = 2 * memory.scaled(memory.graph, rows) / now.host_rate if now.host_rate else float("inf")
    if there_and_back / 2 <= now.answer_s and there_and_back < now.reforward_s:
        return ForwardPlan("graph in host memory", backward, hidden, backward)
    return again(memory, rows)
