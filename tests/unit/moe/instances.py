"""Random profiles and topologies for tests of the placement solvers."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.topology import Topology


def zipf_access(layers: int, experts: int, top_k: int, skew: float, seed: int) -> np.ndarray:
    """[L][E] probabilities by Zipf's law, in random order in each layer, none above 1."""
    rng = np.random.default_rng(seed)
    weights = np.arange(1, experts + 1, dtype=float) ** -skew
    row = np.zeros(experts)
    capped = np.zeros(experts, dtype=bool)
    while True:  # what exceeds a probability of 1 goes to the others
        row[~capped] = weights[~capped] / weights[~capped].sum() * (top_k - capped.sum())
        over = (row > 1) & ~capped
        if not over.any():
            break
        row[over], capped = 1.0, capped | over
    return np.stack([rng.permutation(row) for _ in range(layers)])


def profile_content(probabilities: Any, selected: int, **more: Any) -> dict[str, Any]:
    """The content of a profile file with these probabilities."""
    found = np.asarray(probabilities)
    model = {
        "family": "mixtral",
        "layers": found.shape[0],
        "experts": found.shape[1],
        "top_k": selected,
        "hidden_size": 64,
        "fingerprint": "f00d",
    }
    return {"model": model, "top_k": selected, "tokens": 4096, "access": found.tolist(), **more}


def make_profile(
    layers: int, experts: int, top_k: int = 2, skew: float = 0.8, seed: int = 0
) -> AccessProfile:
    """A profile with Zipf's law."""
    return AccessProfile.model_validate(
        profile_content(zipf_access(layers, experts, top_k, skew, seed), top_k)
    )


def topology_content(nodes: list[int], capacity: int, ratio: float = 16.0, **more: Any) -> dict[str, Any]:
    """The content of a topology file: workers of each node, links within nodes `ratio` times as fast."""
    names = [chr(ord("a") + i) for i in range(len(nodes))]
    return {
        "workers": [
            {"node": name, "capacity": capacity}
            for name, n in zip(names, nodes, strict=True)
            for _ in range(n)
        ],
        "master_node": "a",
        "bandwidth": {"within_node": 1e9 * ratio, "between_nodes": 1e9},
        "uplinks": {name: {"up": 1e9, "down": 1e9} for name in names},
        **more,
    }


def make_topology(nodes: list[int], capacity: int, ratio: float = 16.0, **more: Any) -> Topology:
    """A topology with the same capacity on every worker."""
    return Topology.model_validate(topology_content(nodes, capacity, ratio, **more))
