"""Solvers by name, and ours next to the baselines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_mux.errors import UserError
from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.links import Traffic
from megatron_mux.moe.placement import (
    Placement,
    Solution,
    check_placement,
    from_owners,
)
from megatron_mux.moe.placement_cost import PlacementProblem, make_problem
from megatron_mux.moe.solvers.baselines import contiguous, eplb, sequential, shuffled
from megatron_mux.moe.solvers.full_solver import solve_full
from megatron_mux.moe.solvers.names import SOLVERS
from megatron_mux.moe.solvers.paper_lp import paper_placement
from megatron_mux.moe.solvers.paper_solver import solve_paper
from megatron_mux.moe.topology import Topology


@dataclass(frozen=True)
class Comparison:
    """A solution and the baselines.

    Attributes:
        problem: The problem, which predicts further figures.
    """

    problem: PlacementProblem
    solution: Solution
    baselines: Mapping[str, Placement]


def solve(
    profile: AccessProfile,
    topology: Topology,
    traffic: Traffic,
    objective: str = "vela",
    solver: str = "auto",
    seconds: float = 60.0,
    seed: int = 0,
    groups: int = 1,
) -> Comparison:
    """Place experts.

    Args:
        seed: Of the random placement, and of sets of experts that the profile does not count.
        groups: Groups that experts are routed by, for EPLB.

    Raises:
        UserError: The solver is not known or does not fit, or the topology does not fit the profile or objective.
    """
    began = time.perf_counter()
    if solver not in SOLVERS:
        raise UserError(f"solver: must be one of {', '.join(SOLVERS)}, got {solver!r}")
    problem = make_problem(profile, topology, traffic, objective, seed)
    baselines = _baselines(problem, seed, groups)
    bound = 0.0
    if topology.master_node is not None:
        paper = problem if objective == "vela" else make_problem(profile, topology, traffic, "vela")
        owners, bound = paper_placement(paper)
        baselines["paper-lp"] = from_owners(owners)
    elif solver == "paper-lp":
        raise UserError("solver: paper-lp needs a master: give master_node in the topology")
    finished = True
    # The bound is that of our solver, whichever solver places the experts.
    if objective == "vela":
        owners, bound, finished = solve_paper(problem, began + seconds)
        ours = from_owners(owners)
    else:
        starts = dict(baselines)
        if topology.master_node is not None:
            starts["paper"] = from_owners(solve_paper(paper, time.perf_counter() + seconds / 4)[0])
        ours, bound, finished = solve_full(problem, starts, began + seconds - time.perf_counter())
    best = min((ours, *baselines.values()), key=problem.placement_cost)
    chosen = best if solver == "auto" else baselines[solver]
    check_placement(
        chosen, problem.layers, problem.experts, problem.workers, problem.capacities, problem.allows_replicas
    )
    cost = problem.placement_cost(chosen)
    solution = Solution(chosen, cost, min(bound, cost), time.perf_counter() - began, solver, finished)
    return Comparison(problem, solution, baselines)


def _baselines(problem: PlacementProblem, seed: int, groups: int) -> dict[str, Placement]:
    """Placements of the baselines that need no linear program."""
    nodes = problem.links.worker_nodes
    return {
        "contiguous": from_owners(contiguous(problem)),
        "sequential": from_owners(sequential(problem)),
        "random": from_owners(shuffled(problem, seed)),
        "eplb": eplb(problem, problem.allows_replicas, groups, nodes),
    }
