"""The two objectives of placement, in seconds of a step.

`vela` is the paper's (8): the master waits in each layer for the slowest worker, and every selected expert receives a
row of its own. `full` counts what moves: rows of every sender, once per worker that a token visits, forward and
backward, on single and on shared links, and the experts' compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_mux.errors import UserError
from megatron_mux.expert_shape import serving_rank
from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.links import Links, Traffic, answers_on_top, links_of, paper_seconds
from megatron_mux.moe.placement import Placement, has_replicas, to_owners
from megatron_mux.moe.routed_sets import RoutedSets, sets_of
from megatron_mux.moe.topology import Topology

TRANSFERS = 4
"""Transfers of a layer and step: tokens out and back, gradients out and back."""


@dataclass(frozen=True)
class PlacementProblem:
    """What a solver needs to know. L: layers, E: experts, N: workers.

    A layer takes the sum, over groups of links, of the longest time of a link in the group, plus the longest compute of
    a worker. Seconds of a link are a row of `link_seconds` times the layer's visits. The first N links of each group
    are those of single workers. The last group takes longer if answers share a link: see `links`.

    Attributes:
        access: [L][E] probability that a token selects the expert.
        capacities: [N] experts that a worker can hold over all layers.
        link_seconds: [links][N] seconds for each worker that all tokens visit, each group after the other.
        groups: Index of the first row of each group in `link_seconds`.
        sharing: [N] seconds of a worker's answer on a link that a master's answers share, over those on its own link.
        compute_seconds: [N] seconds of compute if every token selects one expert on the worker.
        sets: [L] sets of experts that tokens select; None: each selected expert is a visit of its own (`vela`).
        links: The links, for placements with replicas.
        row_bytes: Bytes of one token's features and of what travels beside them.
    """

    access: Floats
    capacities: Ints
    link_seconds: Floats
    groups: tuple[int, ...]
    sharing: Floats
    compute_seconds: Floats
    sets: tuple[RoutedSets, ...] | None
    links: Links
    row_bytes: float

    @property
    def layers(self) -> int:
        """L."""
        return int(self.access.shape[0])

    @property
    def experts(self) -> int:
        """E."""
        return int(self.access.shape[1])

    @property
    def workers(self) -> int:
        """N."""
        return len(self.capacities)

    @property
    def allows_replicas(self) -> bool:
        """Whether an expert may be placed several times: not in the paper's (10); a master has only one nearest one."""
        return self.sets is not None and len(self.links.senders) > 1

    def rows(self, layer: int, owners: Ints) -> Floats:
        """[N] expected experts of a token that are on each worker.

        Args:
            owners: [E] worker of each expert.
        """
        rows = np.bincount(owners, self.access[layer], minlength=self.workers)
        return np.asarray(rows, dtype=np.float64)

    def visits(self, layer: int, owners: Ints) -> Floats:
        """[N] expected rows that each worker receives of a token: at most 1 if rows are sent once per worker."""
        if self.sets is None:
            return self.rows(layer, owners)
        return self.sets[layer].visits(owners, self.workers)

    def seconds(self, visits: Floats, rows: Floats) -> Floats:
        """Seconds of a layer.

        Args:
            visits, rows: [..., N] see the methods of these names.

        Returns:
            [...]
        """
        times = np.moveaxis(visits @ self.link_seconds.T, -1, 0)
        return np.asarray(self.transfer_seconds(times) + (rows * self.compute_seconds).max(axis=-1))

    def transfer_seconds(self, times: Floats) -> Floats:
        """[...] seconds of a layer's transfers, from those of each link, [links, ...]."""
        parts = np.maximum.reduceat(times, self.groups, axis=0)
        if self.sharing.any():
            parts[-1] = np.maximum(parts[-1], answers_on_top(self.shared_answers(times)))
        return np.asarray(parts.sum(axis=0))

    def shared_answers(self, times: Floats) -> Floats:
        """[N, ...] seconds of each worker's answer on the link that answers share; `times` is [links, ...]."""
        of_workers = times[self.groups[-1] :][: self.workers]
        return of_workers * self.sharing.reshape(-1, *[1] * (of_workers.ndim - 1))

    def layer_cost(self, layer: int, owners: Ints) -> float:
        """Seconds of a layer; `owners` is [E]."""
        return float(self.seconds(self.visits(layer, owners), self.rows(layer, owners)))

    def cost(self, owners: Ints) -> float:
        """Seconds of a step with one worker for each expert, [L][E]."""
        return sum(self.layer_cost(layer, owners[layer]) for layer in range(self.layers))

    def placement_cost(self, placement: Placement) -> float:
        """Seconds of a step with a placement that may have replicas.

        Raises:
            ValueError: It has replicas, and the objective knows none.
        """
        if not has_replicas(placement):
            return self.cost(to_owners(placement))
        if self.sets is None:
            raise ValueError("the paper's objective has no replicas")
        return sum(self.replicated_layer_cost(layer, row) for layer, row in enumerate(placement))

    def replicated_layer_cost(self, layer: int, row: tuple[tuple[int, ...], ...]) -> float:
        """Seconds of a layer whose experts may have several workers; `row` is [E] workers."""
        visits, rows = self._by_sender(layer, row)
        share = self.links.bytes_sent / self.links.bytes_sent.sum()
        return self.links.seconds(visits) + float((share @ rows * self.compute_seconds).max())

    def _by_sender(self, layer: int, row: tuple[tuple[int, ...], ...]) -> tuple[Floats, Floats]:
        """[S][N] visits and rows of a token of each sender, with the replicas that serve it."""
        links = self.links
        visits = np.empty((len(links.senders), self.workers))
        rows = np.empty_like(visits)
        for s, (sender, node) in enumerate(zip(links.senders, links.sender_nodes, strict=True)):
            owners = np.array([serving_rank(workers, sender, node, links.worker_nodes) for workers in row])
            visits[s], rows[s] = self.visits(layer, owners), self.rows(layer, owners)
        return visits, rows

    def visits_by_sender(self, layer: int, row: tuple[tuple[int, ...], ...]) -> Floats:
        """[S][N] expected rows of a token of each sender that each worker receives; `row` is [E] workers."""
        if any(len(workers) > 1 for workers in row):
            return self._by_sender(layer, row)[0]
        visits = self.visits(layer, np.array([workers[0] for workers in row]))
        return np.tile(visits, (len(self.links.senders), 1))

    def cross_node_bytes(self, placement: Placement) -> float:
        """Bytes per token and step between nodes, forward and backward, all layers."""
        links = self.links
        away = links.away * (links.bytes_sent / links.bytes_sent.sum())[:, None]
        total = sum(
            float((self.visits_by_sender(layer, row) * away).sum()) for layer, row in enumerate(placement)
        )
        return TRANSFERS * self.row_bytes * total


def make_problem(
    profile: AccessProfile, topology: Topology, traffic: Traffic, objective: str, seed: int = 0
) -> PlacementProblem:
    """Combine a profile and a topology to a problem.

    Args:
        topology: The topology; with the objective `full` and without a master, every worker sends tokens.
        seed: Seed of sets of experts that are drawn if the profile has none.

    Raises:
        UserError: The workers cannot hold all experts, or the paper's objective lacks a master.
    """
    topology.check_capacity(profile.model.layers, profile.model.experts)
    access = profile.access * (profile.top_k / profile.access.sum(axis=1, keepdims=True))
    links = links_of(topology, traffic)
    if objective == "vela":
        seconds, groups = np.diag(paper_seconds(topology, traffic)), [0]
        compute, sets = np.zeros(len(topology.workers)), None
        sharing = np.zeros(len(topology.workers))
    elif objective == "full":
        outward, inward = links.matrices()
        seconds, groups = 2.0 * np.concatenate([outward, inward]), [0, len(outward)]
        own_node, shared = np.diag(inward[: len(topology.workers)]), links.shared_seconds
        sharing = np.divide(shared, own_node, out=np.zeros_like(shared), where=shared > 0)
        compute, sets = traffic.tokens * topology.row_seconds, sets_of(profile, seed)
    else:
        raise UserError(f"objective: must be vela or full, got {objective!r}")
    return PlacementProblem(
        access,
        topology.capacities,
        seconds,
        tuple(groups),
        sharing,
        compute,
        sets,
        links,
        traffic.row_bytes + traffic.routing_bytes,
    )
