"""Which experts rows select where no router has run: in dry runs and closed forms, before a run.

Every expert is selected equally often. The experts of a row are as far apart in the order of their numbers as can be:
where neighbouring experts share a rank, as many ranks as possible get the row. A real router sends rows to fewer.

Shapes: R rows, E experts, K of them for a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_mux.expert_shape import Experts, Placement

_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, modulo 1, are spread evenly however many of them there are."""
_SAMPLE = 4096
"""Rows from which shares are taken."""


def assumed_experts(rows: int, experts: int, top_k: int) -> npt.NDArray[np.int64]:
    """Experts of rows, by systematic sampling: K distinct ones for each row.

    Args:
        rows: R.
        experts: E.
        top_k: K.

    Returns:
        `[R, K]`.
    """
    places = ((np.arange(1, rows + 1) * _GOLDEN) % 1.0)[:, None] + np.arange(top_k)
    return np.minimum(places * experts / top_k, experts - 1).astype(np.int64)


@dataclass(frozen=True)
class ExpertLoad:
    """What a rank computes of a layer's experts, for each row that a rank has, averaged over layers.

    Attributes:
        sent: Rows that the rank sends, to itself too; one for each rank with a share of the row's experts.
        received: Rows that it receives.
        pairs: Pairs of a row and an expert that it computes.
        held: Experts that it holds.
    """

    sent: float = 1.0
    received: float = 1.0
    pairs: float = 1.0
    held: float = 1.0

    @classmethod
    def of(
        cls, experts: Experts, ranks: int = 1, tensor: int = 1, placement: Placement | None = None
    ) -> list[ExpertLoad]:
        """The load of each expert rank.

        Args:
            experts: The backbone's.
            ranks: Expert ranks.
            tensor: Ranks that divide the matrices of an expert.
            placement: Which expert ranks hold which experts; None: neighbouring ones share a rank.
        """
        if placement is None:
            placement = Placement.contiguous(experts.count, ranks, (0,))
        selected = assumed_experts(_SAMPLE, experts.count, experts.routing.top_k)
        sent, received, pairs, held = np.zeros((4, ranks))
        for layer in placement.ranks:
            for source in range(ranks):
                served = np.asarray(placement.serving(layer, source))[selected]  # [R, K]
                for rank in range(ranks):
                    here = served == rank
                    sent[source] += here.any(axis=1).mean()
                    received[rank] += here.any(axis=1).mean()
                    pairs[rank] += here.sum(axis=1).mean()
                    held[rank] += len(placement.held(layer, rank)) / ranks
        table = np.stack((sent * tensor, received * tensor, pairs * tensor, held), axis=1) / len(
            placement.ranks
        )
        return [cls(*row) for row in table.tolist()]
