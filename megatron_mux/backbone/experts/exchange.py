"""Sending rows to the ranks that hold their experts, and the sums of what those computed back.

A row goes to a rank once, however many of its experts are there, with their numbers and weights in the same message:
the rank returns the weighted sum. Ranks that divide an expert's matrices each get the row and return part of the sum.

How messages travel is for `all_to_all` (each rank has rows) and `master_exchange` (one has).

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

from megatron_mux.backbone.experts.permutation import sum_of_places
from megatron_mux.backbone.experts.router import Routes
from megatron_mux.expert_managers import PendingSend
from megatron_mux.expert_ranks import ExpertRanks


@dataclass(frozen=True)
class Choice:
    """Which of this rank's rows go to which ranks: on the device, until the host knows how many.

    Attributes:
        experts: `[R, K]` int64, the experts of rows.
        served: `[R, K]` int64, the expert rank that computes each.
        to: `[ranks, R]` bool, whether a rank gets a row.
        counts: `[ranks, 2]` int32, rows for each rank, and their pairs that it computes.
        tensor_size: Ranks that divide an expert's matrices, next to each other.
    """

    experts: Tensor
    served: Tensor
    to: Tensor
    counts: Tensor
    tensor_size: int

    @classmethod
    def of(cls, routes: Routes, serving: Tensor, ranks: ExpertRanks) -> Choice:
        """Choose ranks for rows.

        Args:
            serving: `[E]` int64, the expert rank that computes this rank's rows of each expert.
        """
        served = serving[routes.experts]
        times = torch.zeros(len(served), ranks.size, dtype=torch.int32, device=served.device)
        times.scatter_add_(1, served, torch.ones_like(served, dtype=torch.int32))
        there = times > 0
        counts = torch.stack((there.sum(dim=0), times.sum(dim=0)), dim=1).int()
        to = there.t()
        if ranks.tensor_size > 1:
            to, counts = (own.repeat_interleave(ranks.tensor_size, dim=0) for own in (to, counts))
        return cls(routes.experts, served, to, counts, ranks.tensor_size)

    def taken(self, total: int) -> tuple[Tensor, Tensor]:
        """The `total` rows that are sent, rank by rank: `[S]` int64; their experts `[S, K]`, -1 for other ranks'."""
        place = _places_of_true(self.to, total)
        rank = place.div(len(self.served), rounding_mode="floor")
        rows = place - rank * len(self.served)
        elsewhere = self.served[rows] != (rank // self.tensor_size).unsqueeze(1)
        return rows, self.experts[rows].masked_fill(elsewhere, -1)

    def returning(self, total: int) -> tuple[Tensor, Tensor]:
        """Where the sums of the `total` rows come back: `[S]` int64 places by rows, and each row's first `[R]`."""
        place = _places_of_true(self.to.t(), total)
        row = place.div(len(self.to), rounding_mode="floor")
        there = (self.to.flatten().cumsum(0) - 1).view(self.to.shape)
        of_row = self.to.sum(dim=0)
        return there[place - row * len(self.to), row], of_row.cumsum(0) - of_row


def _places_of_true(mask: Tensor, count: int) -> Tensor:
    """`[count]` int64: the places of what is true, of which the host knows how many there are, in order."""
    number = torch.arange(1, count + 1, device=mask.device)
    return torch.searchsorted(mask.flatten().cumsum(0), number)


class PendingRows:
    """A tensor that is being received.

    Args:
        value: Where it arrives.
        works: Done once it has; waited for in this order.
        given: What was sent for it, kept until then.
    """

    def __init__(
        self, value: Tensor, works: Sequence[dist.Work | PendingSend], given: Tensor | None = None
    ) -> None:
        self._value, self._works, self._given = value, works, given

    @property
    def work(self) -> dist.Work | PendingSend | None:
        """What tells of its arrival; None: several do, or nothing was needed."""
        return self._works[0] if len(self._works) == 1 else None

    def wait(self) -> Tensor:
        """The message, once it is there."""
        for work in self._works:
            work.wait()
        return self._value


class Sent(ABC):
    """Where rows went: what both directions of the exchange need.

    Args:
        outgoing, incoming: Rows sent to each rank and received from each.
        pairs: Pairs that this rank computes of those it receives.
    """

    def __init__(
        self, choice: Choice, outgoing: tuple[int, ...], incoming: tuple[int, ...], pairs: int
    ) -> None:
        total = sum(outgoing)
        self.rows, self.experts = choice.taken(total)
        self._places, self._starts = choice.returning(total)
        self.outgoing, self.incoming, self.pairs = outgoing, incoming, pairs

    def forth(self, x: Tensor) -> PendingRows:
        """Begin to send `[S, W]` to the ranks: `[N, W]`. Every rank calls it."""
        return self._exchange(x.contiguous(), self.outgoing, self.incoming, forth=True)

    def back(self, y: Tensor) -> PendingRows:
        """Begin to send `[N, W]` back: `[S, W]`. Every rank calls it."""
        return self._exchange(y.contiguous(), self.incoming, self.outgoing, forth=False)

    @abstractmethod
    def _exchange(
        self, given: Tensor, outgoing: tuple[int, ...], incoming: tuple[int, ...], forth: bool
    ) -> PendingRows:
        """Begin to send so many rows to each rank, and to receive so many from each."""

    def collected(self, y: Tensor) -> Tensor:
        """Sum what came back for each row, in the order of ranks: `[S, W]` to `[R, W]`."""
        return sum_of_places(y, self._places, self._starts)


class Exchange(ABC):
    """How a layer's rows reach their experts. Every rank makes one.

    Attributes:
        serving: `[E]` int64, the expert rank that computes this rank's rows of each expert; set by the layer.
    """

    serving: Tensor

    def send_to(self, routes: Routes) -> Sent:
        """Agree on which rows go where. Every rank calls it, before the messages."""
        choice, sizes = self.begin(routes)
        return self.agreed(choice, sizes.wait())

    @abstractmethod
    def begin(self, routes: Routes) -> tuple[Choice, PendingRows]:
        """Begin to agree: what this rank chooses, and how many rows will come to it."""

    @abstractmethod
    def agreed(self, choice: Choice, sizes: Tensor) -> Sent:
        """What both directions need, once both results of `begin` are there. The host reads the sizes: it waits once.

        Args:
            choice: What this rank chooses.
            sizes: Rows that come to it, and the pairs that it computes.
        """


@dataclass(frozen=True)
class Received:
    """Rows that a rank received.

    Attributes:
        x: `[N, H]`.
        weights: `[N, K]`.
        experts: `[N, K]` int64; -1 for those that this rank does not compute for the row.
        slots: `[N]` int64.
        pairs: Experts that are not -1.
    """

    x: Tensor
    weights: Tensor
    experts: Tensor
    slots: Tensor
    pairs: int


def dispatch(x: Tensor, routes: Routes, slots: Tensor, sent: Sent, anchor: Tensor) -> Received:
    """Send rows to their experts. Its backward sends gradients back.

    Args:
        x: `[R, H]`.
        slots: `[R]` int64, the slot of each row's task.
        anchor: `[0]`; one that requires a gradient makes every rank take part in the backward.
    """
    received = _Dispatch.apply(x, routes.weights, slots, sent, anchor)  # type: ignore[no-untyped-call]
    x, weights, experts, slots = received
    return Received(x, weights, experts, slots, sent.pairs)


def collect(y: Tensor, sent: Sent) -> Tensor:
    """Send the sums of the received rows' experts back: `[N, H]` to `[R, H]`. Its backward sends gradients forth."""
    collected: Tensor = _Collect.apply(y, sent)  # type: ignore[no-untyped-call]
    return collected


class Rows:
    """Rows on their way to experts, and their gradients on the way back."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._forth: _Form = []
        self._back: _Form = []

    def forth(self, x: Tensor, weights: Tensor, slots: Tensor) -> PendingRows:
        """Begin to send this rank's rows; see `dispatch`."""
        rows = self._sent.rows
        numbers = torch.cat((self._sent.experts, slots[rows].unsqueeze(1)), dim=1).int()
        parts = [x.index_select(0, rows), weights.index_select(0, rows), numbers]
        self._forth = _form(parts)
        return self._sent.forth(_joined(parts))

    def arrived(self, message: Tensor) -> Received:
        """The rows for this rank's experts, from the message that `forth` began."""
        x, weights, numbers = _apart(message, self._forth)
        return Received(x, weights, numbers[:, :-1].long(), numbers[:, -1].long(), self._sent.pairs)

    def back(self, dx: Tensor, dweights: Tensor) -> PendingRows:
        """Begin to send back the gradients of what `arrived` returned."""
        self._back = _form([dx, dweights])
        return self._sent.back(_joined([dx, dweights]))

    def returned(self, message: Tensor) -> list[Tensor]:
        """The gradients of this rank's rows and weights, from the message that `back` began."""
        return [self._sent.collected(part) for part in _apart(message, self._back)]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, slots: Tensor, sent: Sent, anchor: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows = rows = Rows(sent)
        received = rows.arrived(rows.forth(x, weights, slots).wait())
        ctx.mark_non_differentiable(received.experts, received.slots)
        return received.x, received.weights, received.experts, received.slots

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dweights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        rows: Rows = ctx.rows
        return *rows.returned(rows.back(dx, dweights).wait()), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, sent: Sent) -> Tensor:
        ctx.sent = sent
        return sent.collected(sent.back(y).wait())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sent: Sent = ctx.sent
        return sent.forth(gradient.index_select(0, sent.rows)).wait(), None


_Form = list[tuple[int, torch.dtype]]
"""Width and dtype of matrices that travel in one message."""


def _form(parts: list[Tensor]) -> _Form:
    return [(part.shape[1], part.dtype) for part in parts]


def _joined(parts: list[Tensor]) -> Tensor:
    """`[rows, bytes]` uint8 of matrices with equally many rows, whatever their dtypes."""
    return torch.cat(
        [part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in parts], dim=1
    )


def _apart(joined: Tensor, form: _Form) -> list[Tensor]:
    """The matrices in `_joined`."""
    widths = [width * dtype.itemsize for width, dtype in form]
    return [
        # Copied: an aligned matrix of its own, also where there is one row, whose stride `contiguous` would keep.
        part.clone(memory_format=torch.contiguous_format).view(dtype)
        for part, (_, dtype) in zip(joined.split(widths, dim=1), form, strict=True)
    ]
