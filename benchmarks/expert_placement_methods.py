"""The ways of placing experts that `expert_placement.py` compares, and what is predicted of each."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by file path, from a checkout

from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.links import Traffic, routing_bytes
from megatron_mux.moe.placement import Placement
from megatron_mux.moe.placement_cost import PlacementProblem
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
"""What is predicted without being measured, with the solver as it is now."""

NODES = ("a", "a", "b", "b", "c", "c")
"""The node of each worker."""

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
    return "ep" if method.startswith("ep") and method != "eplb" else "broker"


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
        content |= {
            "master_node": nodes[0],
            "master_bandwidth": [min(both) for both in zip(there, back, strict=True)],
        }
    return Topology.model_validate(content)


def place(
    profile: AccessProfile, topologies: Mapping[str, Topology], tokens: int, slack: float
) -> dict[str, Placed]:
    """Place experts by all methods whose team has a topology.

    Args:
        profile: How often tokens select each expert.
        topologies: Of each team.
        tokens: Of a step.
        slack: Slots of all workers together, over the number of experts.
    """
    placed = {}
    for team, topology in topologies.items():
        found = solved(profile, topology, tokens, slack)
        if team == "ep":
            experts, workers = range(profile.model.experts), len(topology.workers)
            around = tuple(tuple((e % workers,) for e in experts) for _ in range(profile.model.layers))
            own = {"ep": around, "ep ours": found.solution.placement}
        else:
            own = {name: found.baselines[name] for name in METHODS if name in found.baselines}
            own["ours"] = found.solution.placement
        for name, placement in own.items():
            placed[name] = predict(found.problem, placement, tokens)
    return placed


def solved(profile: AccessProfile, topology: Topology, tokens: int, slack: float) -> Comparison:
    """Place experts on a team's workers; see `place`."""
    model = profile.model
    assert model.hidden_size is not None
    traffic = Traffic(tokens, 2.0 * model.hidden_size, routing_bytes(profile.top_k))
    slots = math.ceil(slack * model.layers * model.experts / len(topology.workers))
    return solve(profile, topology.with_slots(slots), traffic, "full", seconds=SEARCH_SECONDS)


def predict(problem: PlacementProblem, placement: Placement, tokens: int) -> Placed:
    """Predict the bytes and seconds of a step with so many tokens."""
    return Placed(placement, tokens * problem.cross_node_bytes(placement), problem.placement_cost(placement))


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
