"""Every placement of a tiny model, to compare solvers with."""

from __future__ import annotations

from itertools import product

import numpy as np

from megatron_mux.moe.placement_cost import PlacementProblem


def best_of_all(problem: PlacementProblem) -> float:
    """The least seconds of all placements without replicas that fit the capacities: layers^2 tables of N^E rows."""
    every = [np.array(owners) for owners in product(range(problem.workers), repeat=problem.experts)]
    counts = np.array([np.bincount(owners, minlength=problem.workers) for owners in every])
    reached: dict[tuple[int, ...], float] = {(0,) * problem.workers: 0.0}  # slots used: least seconds
    for layer in range(problem.layers):
        least: dict[tuple[int, ...], float] = {}
        for owners, count in zip(every, counts, strict=True):
            key, seconds = tuple(map(int, count)), problem.layer_cost(layer, owners)
            least[key] = min(least.get(key, np.inf), seconds)
        after: dict[tuple[int, ...], float] = {}
        for used, before in reached.items():
            for count_key, seconds in least.items():
                total = tuple(a + b for a, b in zip(used, count_key, strict=True))
                if all(a <= b for a, b in zip(total, problem.capacities, strict=True)):
                    after[total] = min(after.get(total, np.inf), before + seconds)
        reached = after
    return min(reached.values())
