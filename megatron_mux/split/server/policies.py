"""What the server keeps of a forward pass until its gradients come, and what memory that reserves (Menos, Figure 3).

| policy | the forward pass | while the client answers | the backward pass |
|---|---|---|---|
| `vanilla` | with a graph, on a copy of the body of its own | the whole task (a) | |
| `preserve` | with a graph | M_b (b) | |
| `reforward-with-gradients` | with a graph, which is dropped | its input (c) | again with a graph |
| `on-demand` | without a graph | its input (d) | with a graph |
| `auto` | one of the last, of `preserve` and of a graph in host memory, for each request | | |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_mux.split.server.session_memory import Memory

PolicyName = Literal["on-demand", "auto", "preserve", "reforward-with-gradients", "vanilla"]
POLICIES: tuple[PolicyName, ...] = ("on-demand", "auto", "preserve", "reforward-with-gradients", "vanilla")

Keeping = Literal["input", "graph", "graph in host memory"]


@dataclass(frozen=True)
class ForwardPlan:
    """How a forward pass is computed that has a backward.

    Attributes:
        graph: Whether it builds a graph.
        keeps: What stays until the backward.
        size: Bytes to reserve for it.
        kept: Bytes of them that stay reserved until the backward has been computed.
        backward: Bytes to reserve for the backward, on top of what is kept.
    """

    graph: bool
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
    return ForwardPlan(False, "input", memory.forward_of(rows) + hidden, hidden, memory.backward_of(rows))


def plan_forward(policy: PolicyName, memory: Memory, rows: int, now: Circumstances) -> ForwardPlan:
    """Plan a forward pass.

    `auto` keeps the graph if nobody waits for memory, every other session's backward pass still fits beside it, and it
    saves more seconds than it costs the others (`Circumstances.cost`): a client that answers late leaves the memory to
    those that answer soon. Else the graph goes to host memory if it can go there and come back while the client
    answers, in less time than the second forward pass takes. Else only the input is kept.

    Args:
        policy: Its name.
        memory: Of the session.
        rows: Of the request.
        now: See `Circumstances`; only `auto` looks at it.
    """
    backward, hidden = memory.backward_of(rows), memory.scaled(memory.hidden, rows)
    if policy == "vanilla":  # the whole task has its memory
        return ForwardPlan(True, "graph", 0, 0, 0)
    if policy == "preserve":
        return ForwardPlan(True, "graph", backward, backward, 0)
    if policy == "reforward-with-gradients":
        return ForwardPlan(True, "input", backward, hidden, backward)
    if policy == "on-demand":
        return again(memory, rows)
    fits = not now.waits and now.free - backward >= now.largest
    if fits and now.cost(backward) <= now.reforward_s:
        return ForwardPlan(True, "graph", backward, backward, 0)
    there_and_back = 2 * memory.scaled(memory.graph, rows) / now.host_rate if now.host_rate else float("inf")
    if there_and_back / 2 <= now.answer_s and there_and_back < now.reforward_s:
        return ForwardPlan(True, "graph in host memory", backward, hidden, backward)
    return again(memory, rows)
