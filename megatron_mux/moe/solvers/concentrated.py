"""A start of the search under the full objective: of each layer, all experts away from the master on one worker.

A token is then sent to another node at most once in a layer. Where experts are used evenly, local search does not get
there from placements that spread a layer's experts, since every single move on the way costs time.
"""

from __future__ import annotations

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem
from megatron_mux.moe.solvers.layer_counts import choose_counts

_PRICED = 17
"""Numbers of experts near the master, from none to all, that a layer is priced with; others are interpolated."""


def concentrated(problem: PlacementProblem) -> Ints:
    """Place each layer's hottest experts on the master's node, and the others on as few workers as have room.

    How many are near the master in each layer is chosen by dynamic programming over the layers' seconds.

    Args:
        problem: A problem with a master and the objective `full`.

    Returns:
        [L][E] workers, which fit the capacities.
    """
    away = problem.links.away[0] > 0
    near, far = np.flatnonzero(~away), np.flatnonzero(away)
    hottest = np.argsort(-problem.access, axis=1, kind="stable")
    seconds = np.array([_seconds(problem, layer, hot, near, far) for layer, hot in enumerate(hottest)])
    counts, _ = choose_counts(seconds, *(int(problem.capacities[workers].sum()) for workers in (near, far)))
    owners, left = np.empty_like(hottest), problem.capacities.copy()
    for layer in np.argsort(counts, kind="stable"):  # whatever needs most room on one worker comes first
        hot, rest = np.split(hottest[layer], counts[layer : layer + 1])
        for expert in hot:
            owners[layer, expert] = worker = near[left[near].argmax()]
            left[worker] -= 1
        while len(rest):
            enough = far[left[far] >= len(rest)]
            worker = enough[left[enough].argmin()] if len(enough) else far[left[far].argmax()]
            part, rest = np.split(rest, left[worker : worker + 1])
            owners[layer, part] = worker
            left[worker] -= len(part)
    return owners


def _seconds(problem: PlacementProblem, layer: int, hot: Ints, near: Ints, far: Ints) -> Floats:
    """[E + 1] seconds of a layer by the number of experts near the master, if the first other worker has the rest."""
    experts = problem.experts
    priced = np.unique(np.linspace(0, experts, _PRICED).astype(np.int64))
    owners = np.empty(experts, dtype=np.int64)
    seconds = []
    for count in priced:
        # Without any worker of a kind, `resize` gives another one: the number is not chosen, since there is no room.
        owners[hot[:count]] = np.resize(near, count)
        owners[hot[count:]] = np.resize(far[:1], experts - count)
        seconds.append(problem.layer_cost(layer, owners))
    return np.asarray(np.interp(np.arange(experts + 1), priced, seconds))
