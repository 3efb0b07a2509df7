"""Choosing experts for rows, with the casts of each family's model in transformers.

Shapes: R rows on this rank, E experts, K of them for a row, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux.batch.balancing import NO_ROWS, Balance, NoBalancedRows
from megatron_mux.expert_shape import Routing


class Routes(NamedTuple):
    """The experts of rows.

    Attributes:
        experts: `[R, K]` int64.
        weights: `[R, K]`, what their outputs are multiplied by.
    """

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """A frozen router: no jitter, no limit of an expert's rows."""

    def __init__(self, routing: Routing, experts: int, hidden: int) -> None:
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        if routing.bias:
            self.bias = nn.Parameter(torch.empty(experts))

    def logits(self, x: Tensor) -> Tensor:
        """What scores are made of, for each row of `x` `[R, H]`: `[R, E]`, fp32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.routing.fp32_product:
            return F.linear(x.to(wide), self.weight.to(wide))
        return F.linear(x, self.weight).to(wide)

    def scores(self, x: Tensor) -> Tensor:
        """Score the experts for each row of `x` `[R, H]`: `[R, E]`, fp32 at least."""
        logits = self.logits(x)
        return logits.sigmoid() if self.routing.score == "sigmoid" else logits.softmax(dim=-1)

    def forward(self, x: Tensor, balance: Balance | NoBalancedRows = NO_ROWS) -> Routes:
        """Choose experts for the rows of `x` `[R, H]`; the weights are differentiable with respect to it.

        Args:
            balance: The balancing loss of some of them.
        """
        routing, scores = self.routing, self.scores(x)
        with torch.no_grad():
            ranking = scores + self.bias if routing.bias else scores
            if routing.groups > 1:
                ranking = self._in_best_groups(ranking)
            experts = ranking.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if routing.normalised:
            total = weights.sum(dim=-1, keepdim=True)
            # Sigmoid scores may all vanish; DeepSeek-V3 adds this, softmax families nothing.
            weights = weights / (total + 1e-20 if routing.score == "sigmoid" else total)
        if routing.scale != 1.0:
            weights = weights * routing.scale
        weights = balance.attach(weights, lambda: self._ranked(scores, experts))
        return Routes(experts, weights.to(x.dtype) if routing.cast else weights)

    def _ranked(self, scores: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """What the balancing loss is about, as in Megatron-Core: normalised scores, and the best of them alone.

        Neither groups of experts nor a bias have a say in it.
        """
        routing = self.routing
        if routing.bias or routing.groups > 1:
            experts = scores.detach().topk(routing.top_k, dim=-1).indices
        if routing.score == "sigmoid":
            scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return scores, experts

    def _in_best_groups(self, ranking: Tensor) -> Tensor:
        """`ranking` `[R, E]` with the experts outside of each row's best groups put last."""
        routing = self.routing
        groups = ranking.unflatten(-1, (routing.groups, -1))  # also where there are no rows
        if routing.group_score == "best":
            of_group = groups.amax(dim=-1)
        else:
            of_group = groups.topk(2, dim=-1).values.sum(dim=-1)
        best = of_group.topk(routing.top_groups, dim=-1).indices
        outside = torch.ones_like(of_group, dtype=torch.bool).scatter(1, best, False)
        masked: Tensor = groups.masked_fill(outside.unsqueeze(-1), float("-inf")).view_as(ranking)
        return masked


def no_routes(routing: Routing, x: Tensor) -> Routes:
    """What a router returns for no rows, where there is none; `x` is `[0, H]`."""
    wide = x.dtype if routing.cast else torch.promote_types(x.dtype, torch.float32)
    experts = torch.empty(0, routing.top_k, dtype=torch.int64, device=x.device)
    return Routes(experts, torch.empty_like(experts, dtype=wide))
