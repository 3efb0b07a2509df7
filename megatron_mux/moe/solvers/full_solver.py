"""Our solver of the full objective: local search from several placements, then replicas in spare slots."""

from __future__ import annotations

import time
from collections.abc import Mapping

from megatron_mux.moe.placement import Placement, from_owners, has_replicas, held, to_owners
from megatron_mux.moe.placement_cost import PlacementProblem
from megatron_mux.moe.solvers.concentrated import concentrated
from megatron_mux.moe.solvers.full_bounds import full_bound
from megatron_mux.moe.solvers.local_search import improve_small
from megatron_mux.moe.solvers.replicas import add_replicas

_STARTS = 2
"""Placements that local search starts from: the best of those given, and with a master a concentrated one."""

_BOUND_SHARE = 0.25
"""Share of the time that the lower bound may take."""


def solve_full(
    problem: PlacementProblem, starts: Mapping[str, Placement], seconds: float
) -> tuple[Placement, float, bool]:
    """Minimize the full objective.

    Args:
        problem: A problem with the objective `full`.
        starts: Placements to start from, such as those of the baselines.

    Returns:
        The placement, never worse than the best start; a lower bound; and whether all searches ended by themselves.
    """
    began = time.perf_counter()
    bound = full_bound(problem, seconds * _BOUND_SHARE)
    left = seconds - (time.perf_counter() - began)
    ranked = sorted(starts.values(), key=problem.placement_cost)
    chosen = [ranked[0]]
    single = [start for start in ranked if not has_replicas(start)][:_STARTS]
    if not problem.allows_replicas:
        single.append(from_owners(concentrated(problem)))
    spare = problem.allows_replicas and bool((problem.capacities - held(chosen[0], problem.workers)).any())
    search_share = 0.5 if spare else 1.0
    all_finished = True
    for i, start in enumerate(single):
        until = began + seconds - left * (1 - search_share * (i + 1) / len(single))
        owners, finished = improve_small(problem, to_owners(start), until, bound)
        chosen.append(from_owners(owners))
        all_finished &= finished
    if problem.allows_replicas:
        for start in (min(chosen[1:], key=problem.placement_cost), chosen[0]):
            replicated, finished = add_replicas(problem, start, began + seconds)
            chosen.append(replicated)
            all_finished &= finished
    return min(chosen, key=problem.placement_cost), bound, all_finished
