"""Decides where the experts of a run should be, by what was counted, and moves them.

Workers are expert ranks; with a master, its expert managers: manager n is worker n - 1. Each pipeline stage has expert
ranks of its own, so its layers are placed by themselves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_mux.backbone.experts.moving import trial_seconds
from megatron_mux.engine import Engine
from megatron_mux.engine.agreement import computed_by_first, everyones
from megatron_mux.engine.expert_moves import adapter_bytes_per_expert, place_experts
from megatron_mux.moe.access_counts import Access
from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.entries import Floats
from megatron_mux.moe.links import Traffic, routing_bytes
from megatron_mux.moe.placement import Placement as Rows
from megatron_mux.moe.placement import WorkerKind
from megatron_mux.moe.placement_cost import PlacementProblem, make_problem
from megatron_mux.moe.profile_tasks import identity
from megatron_mux.moe.solvers.replace import prices_of, replace_experts
from megatron_mux.moe.solvers.solve import solve
from megatron_mux.moe.topology import Topology
from megatron_mux.runtime import Parallel
from megatron_mux.training.expert_placement import kind_of_workers

_START_SECONDS, _STEP_SECONDS = 20.0, 2.0
"""Time limits of the search at the start and between steps."""

LEAST_GAIN = 0.05
"""Share of a step's predicted transfers that moves must save: less may be chance."""

_TRIAL_BYTES = 1 << 26
"""Bytes of the trial transfer at most; else an expert's."""


@dataclass(frozen=True)
class Decision:
    """Where experts should be.

    Attributes:
        before, after: Predicted seconds of a step's transfers in the placement in force, and in this one.
        cost: Predicted seconds of moving.
        sent: Predicted seconds of moving by the topology's bandwidths.
    """

    rows: Rows
    before: float
    after: float
    cost: float
    sent: float


class ExpertPlacer:
    """Places the experts of a run. Every rank makes one and calls the same methods.

    Args:
        assumed: Whether the topology's bandwidths are assumed: then they count only relative to each other.
    """

    def __init__(self, engine: Engine, parallel: Parallel, topology: Topology, assumed: bool) -> None:
        shape = engine.backbone.shape
        assert shape.experts is not None
        self.engine, self.parallel, self.topology = engine, parallel, topology
        self.model = identity(engine.backbone.info)
        self.layers = shape.experts.layers(shape.layers)
        self._assumed, self._slowness = assumed, 0.0
        values = 3 * shape.hidden * shape.experts.ffn
        itemsize = engine.backbone.dtype.itemsize
        self._weight_bytes, self._row_bytes = values * itemsize, float(shape.hidden * itemsize)
        self._experts = shape.experts.count
        self._first_worker = parallel.experts.first_worker
        own = [layer for stage in engine.stages.values() for layer in stage.layers]
        stages: dict[int, list[int]] = {}
        for rank, layers in everyones((parallel.pp_rank, own), parallel):
            stages[rank] = [i for i, layer in enumerate(self.layers) if layer in layers]
        self._groups = [places for places in stages.values() if places]

    @property
    def expert_bytes(self) -> float:
        """Bytes that are sent with an expert: its weights, and what managers have of adapters and optimizers there."""
        return self._weight_bytes + adapter_bytes_per_expert(self.engine)

    @property
    def rows(self) -> Rows:
        """[L][E] the workers that hold each expert now."""
        placement = self.engine.backbone.placement
        assert placement is not None
        first = self._first_worker
        return tuple(
            tuple(tuple(rank - first for rank in ranks) for ranks in placement.ranks[layer])
            for layer in self.layers
        )

    @property
    def workers_are(self) -> WorkerKind:
        """What the workers are."""
        return kind_of_workers(self._first_worker)

    # -- deciding

    def decide(self, access: Access, tokens: int, steps: int, anew: bool = False) -> Decision | None:
        """Look for moves that pay over the steps to come. Every rank calls it.

        Args:
            access: What the tasks' data, or recent steps, select, with pairs.
            anew: Also solve the placement anew, which takes longer than to improve the one in force.

        Returns:
            The moves; None if they would cost more than they gain, or gain next to nothing.

        Raises:
            UserError: The workers have no room, or the topology does not fit.
        """
        if anew and not self._slowness:
            self._measure()
        found = self._look(access, tokens, steps, anew)
        if found is not None and not self._slowness:
            self._measure()
            found = self._look(access, tokens, steps, anew)
        return found

    def _look(self, access: Access, tokens: int, steps: int, anew: bool) -> Decision | None:
        traffic = Traffic(tokens, self._row_bytes, routing_bytes(self.model.top_k))
        return computed_by_first(
            lambda: self._improve(access.profile(self.model), traffic, steps, anew), self.parallel
        )

    def _improve(self, profile: AccessProfile, traffic: Traffic, steps: int, anew: bool) -> Decision | None:
        rows = list(self.rows)
        bandwidth, slowness = self.topology.between_workers(), self._slowness or 1.0
        before = after = 0.0
        for places, topology in zip(self._groups, self._shares(), strict=True):
            part = _of_layers(profile, places)
            problem = make_problem(part, topology, traffic, "full")
            old = tuple(rows[place] for place in places)
            prices = prices_of(old, bandwidth, self.expert_bytes, slowness, steps)
            found = [old, replace_experts(problem, old, prices, _STEP_SECONDS / len(self._groups))]
            if anew:
                limit = _START_SECONDS / len(self._groups)
                found.append(solve(part, topology, traffic, "full", seconds=limit).solution.placement)
            new = min(found, key=partial(_with_price, problem, prices, old))
            before += problem.placement_cost(old)
            after += problem.placement_cost(new)
            for place, row in zip(places, new, strict=True):
                rows[place] = row
        prices = prices_of(self.rows, bandwidth, self.expert_bytes, 1.0, 1)
        sent = _price(prices, self.rows, rows)
        cost = sent * slowness
        if before - after < LEAST_GAIN * before or (before - after) * steps <= cost:
            return None
        return Decision(tuple(rows), before, after, cost, sent)

    def _shares(self) -> list[Topology]:
        """For the layers of each stage, the topology with each worker's room for them."""
        if len(self._groups) == 1:
            return [self.topology]
        parts = [len(places) for places in self._groups]
        rooms = shared_room(self.topology.capacities.tolist(), parts, self._experts)
        return [self.topology.with_room(room) for room in rooms]

    def _measure(self) -> None:
        """Measure how long an expert takes from each rank to the next, relative to what the topology says."""
        self._slowness = 1.0
        between = self.topology.between_workers()
        if (
            self._assumed or len(between) < 2
        ):  # if assumed, gains are in the same seconds, which are not real ones
            return
        ranks = self.parallel.experts
        size = min(int(self.expert_bytes) // ranks.tensor_size, _TRIAL_BYTES)  # of each rank that has a part
        measured = self.parallel.most([trial_seconds(ranks, self.parallel.device, size)])[0]
        next_one = np.roll(np.arange(len(between)), -1)
        slowest = between[np.arange(len(between)), next_one].min()
        self._slowness = measured / (size * ranks.tensor_size / slowest)

    # -- moving

    def move(self, decision: Decision) -> tuple[int, float]:
        """Move experts. Every rank calls it, between steps.

        Returns:
            Bytes that all ranks together received, and seconds.
        """
        self.parallel.heartbeat.at("moving experts", long=True)
        placement, first = self.engine.backbone.placement, self._first_worker
        assert placement is not None
        ranks = {
            layer: tuple(tuple(worker + first for worker in workers) for workers in row)
            for layer, row in zip(self.layers, decision.rows, strict=True)
        }
        nodes = tuple(worker.node for worker in self.topology.workers)
        if first:
            nodes = (self.topology.master_node or "", *nodes)
        self.parallel.total([True])  # all of them begin
        began = time.perf_counter()
        received = place_experts(self.engine, replace(placement, ranks=ranks, nodes=nodes))
        total = sum(everyones(received, self.parallel))
        seconds = self.parallel.most([time.perf_counter() - began])[0]
        if decision.sent and not self._assumed:
            self._slowness = seconds / decision.sent
        return total, seconds


def moved(before: Rows, after: Rows, layers: Sequence[int]) -> list[list[int]]:
    """For each expert that comes to a worker: layer, expert, the first worker that had it, and the worker."""
    return [[layers[i], e, before[i][e][0], worker] for i, e, worker in _changed(before, after)]


def _changed(
    before: Sequence[Sequence[Sequence[int]]], after: Sequence[Sequence[Sequence[int]]]
) -> list[tuple[int, int, int]]:
    """Place of the layer, expert and worker of each arrival."""
    return [
        (layer, expert, worker)
        for layer, (old_row, new_row) in enumerate(zip(before, after, strict=True))
        for expert, (old, new) in enumerate(zip(old_row, new_row, strict=True))
        for worker in new
        if worker not in old
    ]


def _price(prices: Floats, before: Rows, after: Sequence[Sequence[Sequence[int]]]) -> float:
    """Seconds of all arrivals; `prices` is [L][E][N]."""
    return sum(float(prices[layer, expert, worker]) for layer, expert, worker in _changed(before, after))


def _with_price(problem: PlacementProblem, prices: Floats, before: Rows, after: Rows) -> float:
    """Seconds of a step, with its part of the moves' cost."""
    return problem.placement_cost(after) + _price(prices, before, after)


def shared_room(room: Sequence[int], parts: Sequence[int], experts: int) -> list[list[int]]:
    """Divide each worker's room among groups of layers by their sizes, so that no group lacks room.

    Args:
        room: [N] experts that a worker can hold over all layers; enough for all together.
        parts: Layers of each group.
        experts: Of a layer.

    Returns:
        [groups][N]; over the groups, they sum to `room`.
    """
    total = sum(parts)
    shares = [[capacity * part // total for capacity in room] for part in parts]
    for worker, capacity in enumerate(room):
        for _ in range(capacity - sum(share[worker] for share in shares)):
            lacking = [part * experts - sum(share) for part, share in zip(parts, shares, strict=True)]
            shares[max(range(len(parts)), key=lacking.__getitem__)][worker] += 1
    return shares


def _of_layers(profile: AccessProfile, places: Sequence[int]) -> AccessProfile:
    """The same profile of some layers."""
    pairs = profile.coactivation
    return profile.model_copy(
        update={
            "model": profile.model.model_copy(update={"layers": len(places)}),
            "layers": tuple(profile.layers[place] for place in places),
            "access": profile.access[list(places)],
            "coactivation": None if pairs is None else pairs[list(places)],
        }
    )


__all__ = ["Decision", "ExpertPlacer", "moved", "shared_room"]
