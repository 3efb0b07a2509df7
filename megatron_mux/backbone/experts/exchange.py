"""Sending rows to the ranks that hold their experts, and the sums of what those computed back.

A row goes to a rank once, however many of its experts are there, with their numbers and weights in the same message:
the rank returns the weighted sum. Ranks that divide an expert's matrices each get the row and return part of the sum.

How messages travel is for `all_to_all` (each rank has rows) and `from_master` (one has).

Shapes: R rows of this rank, K experts of a row, H hidden, S rows that it sends, N rows that it receives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.experts.router import Routes
from megatron_mux.backbone.experts.traffic import Message, Traffic
from megatron_mux.expert_ranks import ExpertRanks, Leaving


@dataclass(frozen=True)
class Choice:
    """Which of this rank's rows go to which ranks.

    Attributes:
        rows: `[S]` int64, in the order in which they are sent, rank by rank.
        experts: `[S, K]` int64, their experts; -1 for those that another rank computes.
        total: R.
        counts: `[ranks]` int64, rows for each rank.
    """

    rows: Tensor
    experts: Tensor
    total: int
    counts: Tensor

    @classmethod
    def of(cls, routes: Routes, serving: Tensor, ranks: ExpertRanks) -> Choice:
        """Choose ranks for rows.

        Args:
            routes: Of the rows.
            serving: `[E]` int64, the expert rank that computes this rank's rows of each expert.
            ranks: The expert ranks.
        """
        served = serving[routes.experts]
        there = torch.zeros(len(served), ranks.size, dtype=torch.bool, device=served.device)
        there.scatter_(1, served, True)
        to = there.t().repeat_interleave(ranks.tensor_size, dim=0)  # [ranks, R]
        receiver, rows = to.nonzero(as_tuple=True)
        elsewhere = served[rows] != (receiver // ranks.tensor_size).unsqueeze(1)
        experts = routes.experts[rows].masked_fill(elsewhere, -1)
        return cls(rows, experts, len(served), to.sum(dim=1))


class Arriving:
    """A message on its way here.

    Args:
        value: Where it arrives.
        works: Done once it has; waited for in this order.
        given: What was sent for it, kept until then.
    """

    def __init__(
        self, value: Tensor, works: Sequence[dist.Work | Leaving], given: Tensor | None = None
    ) -> None:
        self._value, self._works, self._given = value, works, given

    def wait(self) -> Tensor:
        """The message, once it is there."""
        for work in self._works:
            work.wait()
        return self._value


class Sent(ABC):
    """Where rows went: what both directions of the exchange need.

    Args:
        choice: Which rows of this rank go where.
        outgoing, incoming: Rows sent to each rank and received from each.
        traffic: Counts.
    """

    def __init__(
        self, choice: Choice, outgoing: tuple[int, ...], incoming: tuple[int, ...], traffic: Traffic
    ) -> None:
        self.rows, self.experts, self.total = choice.rows, choice.experts, choice.total
        self.outgoing, self.incoming, self.traffic = outgoing, incoming, traffic

    def forth(self, x: Tensor, message: Message) -> Arriving:
        """Begin to send `[S, W]` to the ranks: `[N, W]`. Every rank calls it."""
        self.traffic.add(message, x.shape[1] * x.element_size(), self.outgoing, self.incoming)
        return self._forth(x.contiguous())

    def back(self, y: Tensor, message: Message) -> Arriving:
        """Begin to send `[N, W]` back: `[S, W]`. Every rank calls it."""
        self.traffic.add(message, y.shape[1] * y.element_size(), self.incoming, self.outgoing)
        return self._back(y.contiguous())

    @abstractmethod
    def _forth(self, x: Tensor) -> Arriving: ...

    @abstractmethod
    def _back(self, y: Tensor) -> Arriving: ...

    def collected(self, y: Tensor) -> Tensor:
        """Sum what came back for each row: `[S, W]` to `[R, W]`."""
        summed = y.new_zeros(self.total, y.shape[1])
        # Rank by rank: a row is there once for each, so nothing is added to the same place at once.
        for rows, part in zip(self.rows.split(self.outgoing), y.split(self.outgoing), strict=True):
            summed[rows] += part
        return summed


class Exchange(ABC):
    """How a layer's rows reach their experts. Every rank makes one.

    Attributes:
        serving: `[E]` int64, the expert rank that computes this rank's rows of each expert; set by the layer.
        traffic: What it has cost.
    """

    serving: Tensor
    traffic: Traffic

    @abstractmethod
    def send_to(self, routes: Routes) -> Sent:
        """Agree on which rows go where. Every rank calls it, before the messages.

        Args:
            routes: Of this rank's rows.
        """


@dataclass(frozen=True)
class Received:
    """Rows that a rank received.

    Attributes:
        x: `[N, H]`.
        weights: `[N, K]`.
        experts: `[N, K]` int64; -1 for those that this rank does not compute for the row.
        slots: `[N]` int64.
    """

    x: Tensor
    weights: Tensor
    experts: Tensor
    slots: Tensor


def dispatch(x: Tensor, routes: Routes, slots: Tensor, sent: Sent, anchor: Tensor) -> Received:
    """Send rows to their experts. Its backward sends gradients back.

    Args:
        x: `[R, H]`.
        routes: Of the rows.
        slots: `[R]` int64, the slot of each row's task.
        sent: Which rows go where.
        anchor: `[0]`; one that requires a gradient makes every rank take part in the backward.
    """
    received = _Dispatch.apply(x, routes.weights, slots, sent, anchor)  # type: ignore[no-untyped-call]
    return Received(*received)


def collect(y: Tensor, sent: Sent) -> Tensor:
    """Send the sums of the received rows' experts back: `[N, H]` to `[R, H]`. Its backward sends gradients forth."""
    collected: Tensor = _Collect.apply(y, sent)  # type: ignore[no-untyped-call]
    return collected


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, slots: Tensor, sent: Sent, anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sent = sent
        rows = sent.rows
        numbers = torch.cat((sent.experts, slots[rows].unsqueeze(1)), dim=1).int()
        parts = [x.index_select(0, rows), weights.index_select(0, rows), numbers]
        x, weights, numbers = _apart(sent.forth(_joined(parts), "rows").wait(), parts)
        experts, slots = numbers[:, :-1].long(), numbers[:, -1].long()
        ctx.mark_non_differentiable(experts, slots)
        return x, weights, experts, slots

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dweights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        sent: Sent = ctx.sent
        parts = [dx, dweights]
        back = _apart(sent.back(_joined(parts), "row gradients").wait(), parts)
        return *(sent.collected(part) for part in back), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return sent.collected(sent.back(y, "results").wait())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sent: Sent = ctx.sent
        return sent.forth(gradient.index_select(0, sent.rows), "result gradients").wait(), None


def _joined(parts: list[Tensor]) -> Tensor:
    """`[rows, bytes]` uint8 of matrices with equally many rows, whatever their dtypes."""
    return torch.cat(
        [part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in parts], dim=1
    )


def _apart(joined: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The matrices in `_joined`, which have widths and dtypes of `like`."""
    widths = [part.shape[1] * part.element_size() for part in like]
    return [
        # Copied: an aligned matrix of its own, also where there is one row, whose stride `contiguous` would keep.
        part.clone(memory_format=torch.contiguous_format).view(model.dtype)
        for part, model in zip(joined.split(widths, dim=1), like, strict=True)
    ]
