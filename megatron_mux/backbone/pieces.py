"""Pieces of a computation between messages of ranks: each has an autograd graph of its own.

MuxTune section 3.4.2 ends a subgraph at each communication operator. A `Piece` is what lies between two of them. Its
inputs are detached, so its backward ends there: the caller then sends the gradients, and may compute pieces of other
hybrid tasks until they have arrived.

A computation with messages is a generator. It yields each `Message` and is sent the result when it goes on. Where it
has nothing to send it yields None, so that how often it yields depends on the plan alone, not on a rank's rows.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_mux.attributes import replaced_in

MessageKind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Made = TypeVar("Made")


@dataclass(frozen=True)
class Message:
    """A collective operation over tensor ranks.

    Attributes:
        kind: `all_reduce` sums in place; the others make a new tensor: the rows of all ranks, or this rank's rows of
            the sum.
        tensor: `[rows, 1, H]`, without a gradient.
    """

    kind: MessageKind
    tensor: Tensor


class PendingTensor(Protocol):
    """A tensor that is being received."""

    @property
    def work(self) -> Any:
        """What tells of its arrival, if one thing does."""
        ...

    def wait(self) -> Tensor:
        """What arrives, for computations that follow."""
        ...


@dataclass(frozen=True)
class IssuedMessage:
    """A message that whoever yields it has issued: expert ranks have connections of their own.

    Attributes:
        pending: Its result.
    """

    kind: str
    pending: PendingTensor


CollectiveGenerator = Generator[Message | IssuedMessage | None, Tensor | None, Made]
"""Yields collectives (`Message`), is sent their results, and returns what it has made."""


@dataclass(frozen=True)
class Yields:
    """How often a computation yields, whatever the rows of a rank.

    Attributes:
        forward, backward: In its forward and in its backward pass.
    """

    forward: int
    backward: int

    def __add__(self, other: Yields) -> Yields:
        return Yields(self.forward + other.forward, self.backward + other.backward)

    @property
    def recomputed(self) -> Yields:
        """Those of a computation that is done again before its backward pass."""
        return Yields(self.forward, self.forward + self.backward)


def nothing(times: int) -> CollectiveGenerator[None]:
    """Yield so often without a message."""
    for _ in range(times):
        yield None


def received(result: Tensor | None) -> Tensor:
    """The result of a message that was sent."""
    assert result is not None
    return result


class Piece:
    """A part of a computation with a graph of its own; it keeps no tensor beyond what autograd saves.

    Args:
        anchor: `[0]`, requires a gradient.
    """

    def __init__(self, anchor: Tensor) -> None:
        self._anchor = anchor
        self._gradients: list[Tensor | None] = []
        self._outputs: list[GradientEdge | None] = []

    def input(self, x: Tensor, needs_gradient: bool) -> Tensor:
        """Begin the graph at `x`. `backward` returns its gradient if it needs one."""
        self._gradients.append(None)
        if not (needs_gradient and torch.is_grad_enabled()):
            return x.detach()
        place = self._gradients, len(self._gradients) - 1
        begun: Tensor = _Input.apply(self._anchor, x.detach(), *place)  # type: ignore[no-untyped-call]
        return begun

    def output(self, x: Tensor) -> tuple[Tensor, bool]:
        """End the graph at `x`; returns it detached, and whether it needs a gradient."""
        self._outputs.append(get_gradient_edge(x) if x.requires_grad else None)
        return x.detach(), x.requires_grad

    def backward(self, *gradients: Tensor | None) -> list[Tensor | None]:
        """Back-propagate the gradients of the outputs, and free the graph.

        Returns:
            The gradients of the inputs; None for zero.
        """
        outputs, self._outputs = self._outputs, []
        edges: list[GradientEdge] = []
        needed: list[Tensor] = []
        for edge, gradient in zip(outputs, gradients, strict=True):
            if edge is not None and gradient is not None:
                edges.append(edge)
                needed.append(gradient)
        if edges:
            torch.autograd.backward(edges, needed)
        found, self._gradients = self._gradients, []
        return found


class _Input(torch.autograd.Function):
    """Identity that stores its gradient instead of passing it on. Unlike a leaf it does not keep its value alive."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, gradients: list[Tensor | None], index: int) -> Tensor:
        ctx.gradients, ctx.index = gradients, index
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        ctx.gradients[ctx.index] = gradient
        return None, None, None, None


def without_collectives(*modules: Any) -> AbstractContextManager[None]:
    """Context in which Megatron's parallel linear modules leave their collectives to the caller.

    The flag is Megatron's own, made for experts, whose dispatcher does them. Adapters on a module heed it too.
    """
    return replaced_in(modules, "explicit_expert_comm", True)
