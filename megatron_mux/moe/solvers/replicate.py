"""Replicas of experts in spare slots: each goes where it saves most seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from megatron_mux.moe.placement import Placement, held
from megatron_mux.moe.placement_cost import PlacementProblem

_HOTTEST = 8
"""Experts of a layer that are tried: those with most rows per copy."""

_Row = tuple[tuple[int, ...], ...]


def add_replicas(problem: PlacementProblem, placement: Placement, deadline: float) -> tuple[Placement, bool]:
    """Add replicas while a slot is free and a replica saves time.

    Args:
        problem: A problem that allows replicas.
        placement: [L][E] workers.
        deadline: Value of `time.perf_counter` at which to stop.

    Returns:
        The placement with replicas, and whether the search ended before the deadline.
    """
    rows = list(placement)
    left = problem.capacities - held(placement, problem.workers)
    costs = [problem.replicated_layer_cost(layer, row) for layer, row in enumerate(rows)]
    best: dict[int, tuple[float, int, int]] = {}  # by layer: seconds saved, expert, worker
    stale = set(range(problem.layers))
    while left.any():
        for layer in sorted(stale):
            if time.perf_counter() > deadline:
                return tuple(rows), False
            best[layer] = max(
                _candidates(problem, layer, rows[layer], costs[layer], left), default=(0.0, 0, 0)
            )
        layer = max(best, key=lambda layer: best[layer][0])
        saved, expert, worker = best[layer]
        if saved <= 1e-9 * costs[layer]:
            break
        rows[layer] = _with(rows[layer], expert, worker)
        costs[layer] -= saved
        left[worker] -= 1
        stale = {layer} | {other for other, (_, _, there) in best.items() if not left[there]}
    return tuple(rows), True


def _with(row: _Row, expert: int, worker: int) -> _Row:
    """The row with one more worker for an expert."""
    return tuple(
        tuple(sorted((*workers, worker))) if e == expert else workers for e, workers in enumerate(row)
    )


def _candidates(
    problem: PlacementProblem, layer: int, row: _Row, cost: float, left: np.ndarray
) -> Iterator[tuple[float, int, int]]:
    """Yield seconds saved, expert and worker: of each node, the worker with most free slots."""
    nodes = problem.links.worker_nodes
    per_copy = problem.access[layer] / [len(workers) for workers in row]
    for expert in np.argsort(-per_copy, kind="stable")[:_HOTTEST]:
        taken = set(row[expert])
        for node in dict.fromkeys(nodes):
            free = [n for n, n_node in enumerate(nodes) if n_node == node and left[n] > 0 and n not in taken]
            if free:
                worker = max(free, key=lambda n: left[n])
                with_it = problem.replicated_layer_cost(layer, _with(row, int(expert), worker))
                yield cost - with_it, int(expert), worker
