"""Which experts rows select where no router has run: in dry runs, before a run.

Every expert is selected equally often, or as an access profile says. The experts of a row are as far apart in the order
of their numbers as can be, within the groups that a router may choose from: where neighbouring experts share a rank, as
many ranks as possible get the row. A real router sends rows to fewer.

Shapes: R rows, E experts, K of them for a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.expert_shape import Routing

Access = Mapping[int, Sequence[float]]
"""Of each layer with experts, `[E]` the probability that a row selects each of them."""

_GOLDEN, _SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1
"""Their multiples, modulo 1, are spread evenly however many of them there are, also in pairs."""


def assumed_experts(
    rows: int, experts: int, routing: Routing, access: Sequence[float] | None = None
) -> npt.NDArray[np.int64]:
    """Experts of rows, by systematic sampling: K distinct ones for each row.

    Args:
        routing: How many experts a row has, and from which groups.
        access: `[E]` how likely a row selects each expert, at most 1; None: all are equally likely.

    Returns:
        `[R, K]`.
    """
    top_k, best = routing.top_k, routing.top_groups
    if access is not None:  # which has been counted, groups and all
        ends = np.cumsum(access) * (top_k / np.sum(access))
        found = np.searchsorted(ends, _places(rows, top_k), side="right")
        return np.minimum(found, experts - 1).astype(np.int64)
    if routing.groups == 1:
        return _spread(_places(rows, top_k), experts)
    each = experts // routing.groups
    groups = _spread(_places(rows, best, _SILVER), routing.groups)  # [R, best]
    among = _spread(_places(rows, top_k), best * each)
    of_groups: npt.NDArray[np.int64] = np.take_along_axis(groups, among // each, axis=1)
    return of_groups * each + among % each


def _places(rows: int, count: int, step: float = _GOLDEN) -> npt.NDArray[np.float64]:
    """`[R, count]` numbers, one of each row in each of `count` unit intervals."""
    fractions = np.arange(1, rows + 1) * step % 1.0
    places: npt.NDArray[np.float64] = fractions[:, None] + np.arange(count, dtype=np.float64)
    return places


def _spread(places: npt.NDArray[np.float64], over: int) -> npt.NDArray[np.int64]:
    """Which of `over` equal parts of all unit intervals each place is in."""
    parts: npt.NDArray[np.int64] = np.minimum(places * over / places.shape[1], over - 1).astype(np.int64)
    return parts
