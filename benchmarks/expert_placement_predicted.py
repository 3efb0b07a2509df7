"""What `expert_placement.py` predicts of placements with a master, and the fewest bytes that any of them could send.

A placement's nodes matter to a layer's bytes only as the set of experts near the master: a token with an expert outside
of it is sent away at least once. So a layer is described by the least share of such tokens for each number of experts
near the master, and dynamic programming divides the slots near the master among the layers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from expert_placement_methods import NODES, predict, solved, topology_of
from expert_placement_results import Results

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.entries import Floats
from megatron_mux.moe.placement import from_owners
from megatron_mux.moe.placement_cost import TRANSFERS, PlacementProblem
from megatron_mux.moe.routed_sets import RoutedSets
from megatron_mux.moe.solvers.concentrated import concentrated
from megatron_mux.moe.solvers.layer_counts import choose_counts


def least_rows(sets: RoutedSets, experts: int) -> Floats:
    """[E + 1] least rows of a token that leave the master's node in a layer, by the number of experts there."""
    near = np.arange(1 << experts)  # sets are bits of a number
    away = (np.bitwise_or.reduce(1 << sets.members, axis=1) & ~near[:, None]) != 0
    rows, sizes = away @ sets.weights, np.array([s.bit_count() for s in range(1 << experts)])
    return np.array([rows[sizes == count].min() for count in range(experts + 1)])


def least_bytes(problem: PlacementProblem) -> float:
    """Bytes per token and step between nodes that no placement without replicas goes below; for few experts."""
    away = problem.links.away[0] > 0
    rows = np.array([least_rows(sets, problem.experts) for sets in problem.sets or ()])
    _, total = choose_counts(rows, *(int(problem.capacities[own].sum()) for own in (~away, away)))
    return TRANSFERS * problem.row_bytes * total


def predict_cases(results: Results, wanted: Sequence[tuple[str, float]], work: Path) -> None:
    """Add predictions to measured cases whose profile is in a folder."""
    for name, slack in wanted:
        case, file = results.case(name, slack), work / f"{name}.profile.json"
        if case is not None and file.is_file():
            links = results.links(case["between_mb_s"], case["local_mb_s"])["broker"]
            topology = topology_of(links, [NODES[0], *NODES], True)
            profile, tokens = AccessProfile.model_validate_json(file.read_text()), case["tokens"]
            found = solved(profile, topology, tokens, slack)
            placements = {
                "paper-lp": found.baselines["paper-lp"],
                "concentrated": from_owners(concentrated(found.problem)),
                "ours": found.solution.placement,
            }
            predicted: dict[str, Any] = {"least": {"bytes": tokens * least_bytes(found.problem)}}
            for method, placement in placements.items():
                one = predict(found.problem, placement, tokens)
                rest = case["methods"].get(method, case["methods"]["ours"])["rest_s"]
                predicted[method] = {"bytes": one.crossing, "s": one.seconds + rest}
            case["predicted"] = predicted
    results.write()
