"""What a rank computes and sends for a layer's experts when they are selected evenly, as profiles count it.

The experts of a row are random ones. (Memory is counted for those that are as far apart as can be: `assumed_routes`.)

Shapes: R rows, E experts, K of them for a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron_mux.expert_shape import Experts, Placement, Routing
from megatron_mux.shape import BackboneShape

_SAMPLED = 256
"""Rows by which the ranks of a row are counted."""


@lru_cache(maxsize=8)
def even_selection(count: int, routing: Routing, rows: int) -> npt.NDArray[np.int64]:
    """Select experts for rows, at random but evenly: each row takes those that the rows before it took least.

    So the first rows of many are as even as all of them. Group-limited routing selects groups in the same way first.

    Args:
        count: E.
        routing: How many experts and groups a row has.
        rows: R.

    Returns:
        `[R, K]`.
    """
    random = np.random.default_rng(0)
    used = np.zeros(count)
    chosen = np.empty((rows, routing.top_k), np.int64)
    for selected in chosen:
        order = used + random.random(count)
        if routing.groups > 1:
            of_group = used.reshape(routing.groups, -1).sum(axis=1) + random.random(routing.groups)
            order.reshape(routing.groups, -1)[of_group.argsort()[routing.top_groups :]] = np.inf
        selected[:] = order.argpartition(routing.top_k - 1)[: routing.top_k]
        used[selected] += 1
    return chosen


@dataclass(frozen=True)
class ExpertShares:
    """What a rank has of the experts of a layer, for each row of a micro-batch; all expert ranks have as many rows.

    Attributes:
        held: Experts that the rank holds.
        own: Rows that it routes: with tensor parallelism its part of them.
        pairs: Pairs of a row and an expert that it computes.
        sent: Rows that it sends to expert ranks, itself included; it receives as many. 0: it has all experts.
        away: Those of them that go to other ranks.
    """

    held: float
    own: float
    pairs: float
    sent: float
    away: float

    @classmethod
    def of(cls, shape: BackboneShape, tensor: int, expert: int, expert_tensor: int) -> ExpertShares:
        """The shares of a rank."""
        experts = shape.experts
        assert experts is not None
        share, group = 1 / tensor, expert * expert_tensor
        sent = share * expert_tensor * _ranks_of_a_row(experts, expert) if group > 1 else 0.0
        return cls(
            held=experts.count / expert,
            own=share,
            pairs=share * expert_tensor * experts.routing.top_k,
            sent=sent,
            away=sent * (group - 1) / group,
        )

    def touched(self, rows: float) -> float:
        """Experts of the rank that have pairs of R rows."""
        return min(self.held, max(1.0, self.pairs * rows))


def _ranks_of_a_row(experts: Experts, size: int) -> float:
    """Mean number of expert ranks, of so many, that hold the experts of a row."""
    (ranks,) = Placement.contiguous(experts.count, size, (0,)).ranks.values()
    of_expert = np.array([rank for (rank,) in ranks])
    selected = of_expert[even_selection(experts.count, experts.routing, _SAMPLED)]
    return float(np.mean([len(set(row)) for row in selected.tolist()]))
