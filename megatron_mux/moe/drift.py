"""How far a router's scores drift in a step, and the bound on it (VELA section III, Theorem 1).

The theorem: if one step of SGD changes the weights, `w_t = w_{t-1} - mu g`, the score of expert e for a token x changes
by at most

    |P_t(x)[e] - P_{t-1}(x)[e]| <= mu E L^2 P_{t-1}(x)[e] (1 - P_{t-1}(x)[e])

Its premises: scores are the softmax of the token's logits, expanded to first order; and one constant L bounds both
what a change of the weights does to the logits, ||y_t - y_{t-1}|| <= L ||w_t - w_{t-1}||, and the loss's gradient,
||g|| <= L. The first of the two is all that is needed if the update's norm is known, whatever the optimizer:

    |P_t(x)[e] - P_{t-1}(x)[e]| <= E L ||w_t - w_{t-1}|| P_{t-1}(x)[e] (1 - P_{t-1}(x)[e])

Nobody knows L. It is estimated from steps before the one that is bounded, layer by layer: the largest
||y_t - y_{t-1}|| / ||w_t - w_{t-1}|| of any token so far; for the theorem's own form also the largest gradient norm so
far. So a step can break the bound, by its second order or because L was larger than any step has shown; those that do
are counted.

Shapes: T tokens of a probe, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_mux.moe.observe import watched_routers

if TYPE_CHECKING:
    from megatron_mux.backbone.experts.router import Router, Routes
    from megatron_mux.backbone.model import Backbone

_ROUNDING = 16
"""Differences of scores of so many rounding errors of 1 count as none."""


@dataclass(frozen=True)
class LayerDrift:
    """A layer's drift in a step, over all tokens of the probe and all experts.

    Attributes:
        mean, largest: Of |P_t - P_{t-1}|.
        bound_mean, bound_largest: Of the bound by the update's norm; None where nothing is known of L yet.
        violations: How many of the T x E scores changed by more than that.
        paper_mean: Mean of the theorem's own bound; None unless the optimizer is SGD without weight decay.
        paper_violations: How many changed by more than that.
        changed: Share of the tokens' choices of experts that fell on others.
    """

    mean: float
    largest: float
    bound_mean: float | None
    bound_largest: float | None
    violations: int
    paper_mean: float | None
    paper_violations: int
    changed: float


def larger_reach(known: float | None, before: Tensor, after: Tensor, update_norm: float) -> float | None:
    """The largest change of a token's logits per change of the weights that any step of a layer has shown.

    Args:
        known: Of the steps before; None: there were none.
        before, after: `[T, E]` logits.
        update_norm: ||w_t - w_{t-1}||.
    """
    if update_norm <= 0:
        return known
    return max(known or 0.0, float((after - before).norm(dim=1).max()) / update_norm)


def layer_drift(
    before: Tensor, after: Tensor, top_k: int, reach: float | None, paper_reach: float | None
) -> LayerDrift:
    """Compare a layer's scores before and after a step with the bound.

    Args:
        before, after: `[T, E]` logits.
        reach: L ||w_t - w_{t-1}||, which bounds the change of a token's logits; None: not known.
        paper_reach: mu L^2; None: not known, or the premises do not hold.
    """
    old, new = before.softmax(dim=1), after.softmax(dim=1)
    drift = (new - old).abs()
    uncertainty = before.shape[1] * old * (1 - old)
    slack = _ROUNDING * torch.finfo(before.dtype).eps
    bound, violations = _compare(drift, uncertainty, reach, slack)
    paper, broken = _compare(drift, uncertainty, paper_reach, slack)
    chosen = [
        torch.zeros_like(old).scatter(1, scores.topk(top_k, dim=1).indices, 1.0) for scores in (old, new)
    ]
    return LayerDrift(
        mean=float(drift.mean()),
        largest=float(drift.max()),
        bound_mean=None if bound is None else float(bound.mean()),
        bound_largest=None if bound is None else float(bound.max()),
        violations=violations,
        paper_mean=None if paper is None else float(paper.mean()),
        paper_violations=broken,
        changed=float((chosen[0] - chosen[1]).abs().sum() / (2 * top_k * len(old))),
    )


def _compare(
    drift: Tensor, uncertainty: Tensor, reach: float | None, slack: float
) -> tuple[Tensor | None, int]:
    """The bound of each score, and how many scores are beyond it."""
    if reach is None:
        return None, 0
    bound = uncertainty * reach
    return bound, int((drift > bound + slack).sum())


@contextmanager
def observing_logits(backbone: Backbone) -> Iterator[dict[int, Tensor]]:
    """Context in which the routers' logits of the last pass are kept, `[T, E]` by layer, on the host."""
    logits: dict[int, Tensor] = {}

    def keep(layer: int, router: Router, x: Tensor, routes: Routes) -> None:
        logits[layer] = router.logits(x).cpu()

    with watched_routers(backbone, keep):
        yield logits
