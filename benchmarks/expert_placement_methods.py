"""The ways of placing experts that `expert_placement.py` compares, what is predicted of each, and the fewest bytes.

A placement's nodes matter to a layer's bytes only as the set of experts near the master: a token with an expert outside
of it is sent away at least once. So a layer is described by the least share of such tokens for each number of experts
near the master, and dynamic programming divides the slots near the master among the layers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.entries import Floats
from megatron_mux.moe.links import Traffic, routing_bytes
from megatron_mux.moe.placement import Placement, from_owners
from megatron_mux.moe.placement_cost import TRANSFERS, PlacementProblem
from megatron_mux.moe.routed_sets import RoutedSets
from megatron_mux.moe.solvers.concentrated import concentrated
from megatron_mux.moe.solvers.layer_counts import choose_counts
from megatron_mux.moe.solvers.solve import Comparison, solve
from megatron_mux.moe.topology import Topology

METHODS = {
    "ep": "expert parallel, e to e mod N",
    "ep ours": "expert parallel, ours",
    "sequential": "broker, sequential",
    "random": "broker, random",
    "eplb": "broker, EPLB",
    "paper-lp": "broker, VELA's LP",
    "ours": "broker, ours",
}
"""What each method is; all but the first two have a master that sends all tokens."""

PREDICTED = {
    "least": "broker, least possible",
    "paper-lp": METHODS["paper-lp"],
    "concentrated": "broker, each layer on one distant manager",
    "ours": METHODS["ours"],
}
"""What is predicted without being measured."""

NODES = ("a", "a", "b", "b", "c", "c")
"""The node of each worker."""
TEAM_NODES = {"ep": NODES, "broker": (NODES[0], *NODES)}
"""The nodes of the processes that train together: with a master, it is the first."""

SEARCH_SECONDS = 5.0


@dataclass(frozen=True)
class Placed:
    """A placement and what is predicted of it.

    Attributes:
        placement: [L][E] workers.
        crossing: Bytes of a step between nodes.
        seconds: Seconds of a step's transfers.
    """

    placement: Placement
    crossing: float
    seconds: float


def team_of(method: str) -> str:
    """Which processes train with a method: `ep` or `broker`."""
    return "ep" if method in ("ep", "ep ours") else "broker"


def topology_of(links: Mapping[str, Any], nodes: Sequence[str], master: bool) -> Topology:
    """Topology from measured links, of workers that have room for any number of experts.

    Args:
        links: What `Worker.links` returns.
        nodes: Of all processes, the master first if there is one.
        master: Whether there is one.
    """
    first = 1 if master else 0
    content: dict[str, Any] = {
        "workers": [{"node": node, "capacity": 0} for node in nodes[first:]],
        "bandwidth": [row[first:] for row in links["bandwidth"][first:]],
        "uplinks": {node: {"up": links["up"][node], "down": links["down"][node]} for node in links["up"]},
    }
    if master:
        there, back = links["bandwidth"][0][1:], [row[0] for row in links["bandwidth"][1:]]
        content["master_node"] = nodes[0]
        content["master_bandwidth"] = [min(both) for both in zip(there, back, strict=True)]
    return Topology.model_validate(content)


def solved(profile: AccessProfile, topology: Topology, tokens: int, slack: float) -> Comparison:
    """Place experts on a team's workers.

    Args:
        tokens: Of a step.
        slack: Slots of all workers together, over the number of experts.
    """
    model = profile.model
    assert model.hidden_size is not None
    traffic = Traffic(tokens, 2.0 * model.hidden_size, routing_bytes(profile.top_k))
    slots = math.ceil(slack * model.layers * model.experts / len(topology.workers))
    return solve(profile, topology.with_slots(slots), traffic, "full", seconds=SEARCH_SECONDS)


def placed_by_all(found: Mapping[str, Comparison], tokens: int) -> dict[str, Placed]:
    """The placements of all methods, from what was solved for each team."""
    alone, managed = found["ep"], found["broker"]
    row = tuple((e % len(NODES),) for e in range(alone.problem.experts))
    placements = {
        "ep": (alone, (row,) * alone.problem.layers),
        "ep ours": (alone, alone.solution.placement),
        **{name: (managed, managed.baselines[name]) for name in METHODS if name in managed.baselines},
        "ours": (managed, managed.solution.placement),
    }
    return {name: _predict(own, placement, tokens) for name, (own, placement) in placements.items()}


def predictions(found: Comparison, tokens: int, measured: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Bytes and seconds of a step by placements with a master, and the fewest bytes that any of them could send.

    Args:
        measured: Figures by method: what a step takes over links without limits is added.
    """
    predicted = {"least": {"bytes": tokens * least_bytes(found.problem)}}
    for method, placement in (
        ("paper-lp", found.baselines["paper-lp"]),
        ("concentrated", from_owners(concentrated(found.problem))),
        ("ours", found.solution.placement),
    ):
        one, rest = _predict(found, placement, tokens), measured.get(method, measured["ours"])["rest_s"]
        predicted[method] = {"bytes": one.crossing, "s": one.seconds + rest}
    return predicted


def _predict(found: Comparison, placement: Placement, tokens: int) -> Placed:
    problem = found.problem
    return Placed(placement, tokens * problem.cross_node_bytes(placement), problem.placement_cost(placement))


def least_bytes(problem: PlacementProblem) -> float:
    """Bytes per token and step between nodes that no placement without replicas goes below; for few experts."""
    away = problem.links.away[0] > 0
    rows = np.array([_least_rows(sets, problem.experts) for sets in problem.sets or ()])
    _, total = choose_counts(rows, *(int(problem.capacities[own].sum()) for own in (~away, away)))
    return TRANSFERS * problem.row_bytes * total


def _least_rows(sets: RoutedSets, experts: int) -> Floats:
    """[E + 1] least rows of a token that leave the master's node in a layer, by the number of experts there."""
    near = np.arange(1 << experts)  # sets are bits of a number
    away = (np.bitwise_or.reduce(1 << sets.members, axis=1) & ~near[:, None]) != 0
    rows, sizes = away @ sets.weights, np.array([s.bit_count() for s in range(1 << experts)])
    return np.array([rows[sizes == count].min() for count in range(experts + 1)])


def gradient_seconds(summed: int, topology: Topology) -> float:
    """Seconds in which workers sum adapters' gradients on a ring, as gloo does; none with a master.

    Args:
        summed: Bytes of the gradients.
        topology: Of the workers; each node's uplink carries what one of them passes on.
    """
    if topology.master_node is not None:
        return 0.0
    slowest = min(min(link.up, link.down) for link in topology.uplinks.values())
    count = len(topology.workers)
    return 2 * (count - 1) / count * summed / slowest
