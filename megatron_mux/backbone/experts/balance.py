"""Attaching the balancing loss to a router: its gradient joins that of the weights, through the scores.

Shapes: R rows on this rank, E experts, K of them for a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_mux.batch.balancing import RouterLoadAccumulator


@dataclass(frozen=True)
class Balance:
    """The balancing loss of a pass's rows in a layer.

    Attributes:
        layer: Global index of the layer.
        numbers: `[R]` int64, the number of each row's sequence in the router's loads.
        loads: Of the micro-batch.
        group: Tensor ranks that divide the rows of each sequence; None: this rank has them all.
        again: Whether the pass is computed again for its backward, and so is counted already.
    """

    layer: int
    numbers: Tensor
    loads: RouterLoadAccumulator
    group: dist.ProcessGroup | None
    again: bool

    def attach(self, weights: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Count the rows, and have the backward pass of `weights` add the loss's gradient to that of `scores`.

        Args:
            weights: `[R, K]`, what the router returns.
            scores: `[R, E]`, normalised.
            chosen: `[R, K]` int64, the experts with the best scores.

        Returns:
            `weights`, unchanged.
        """
        if not self.again:
            self.loads.add(self.layer, self.numbers, scores, chosen, self.group)
        if not weights.requires_grad:
            return weights
        attached: Tensor = _Attach.apply(weights, scores, self)  # type: ignore[no-untyped-call]
        return attached


class _Attach(Function):
    """Identity of the weights; the scores' gradient is read in the backward, when all chunks are counted."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor, balance: Balance) -> Tensor:
        ctx.balance = balance
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        balance: Balance = ctx.balance
        return gradient, balance.loads.gradient(balance.layer, balance.numbers), None
