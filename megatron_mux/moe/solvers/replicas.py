"""Replicas of experts: added in spare slots, and changed in a placement that is in force where that is worth its price.

A hot expert gets a copy on another worker: in a free slot, or in the place of the coldest expert there, if that one has
other copies; or one of its copies moves there, or exchanges workers with the coldest one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement import Placement, held
from megatron_mux.moe.placement_cost import PlacementProblem

_HOTTEST = 8
"""Experts of a layer that are tried: those with most rows per copy."""
LEAST_GAIN = 1e-9
"""Share of a layer's seconds that a change must gain beyond its price."""

Row = tuple[tuple[int, ...], ...]
"""[E] the workers of each expert of a layer."""


def _hottest_first(problem: PlacementProblem, layer: int, row: Row) -> Ints:
    """[E] experts in the order of how often a token selects them, divided by their copies."""
    per_copy = problem.access[layer] / [len(workers) for workers in row]
    return np.argsort(-per_copy, kind="stable")


def _changed(row: Row, changes: dict[int, tuple[int | None, int | None]]) -> Row:
    """The row with, for some experts, a worker that it leaves and one that it comes to."""
    changed = list(row)
    for expert, (old, new) in changes.items():
        workers = {*row[expert]} - {old} | {new}
        changed[expert] = tuple(sorted(worker for worker in workers if worker is not None))
    return tuple(changed)


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
        if saved <= LEAST_GAIN * costs[layer]:
            break
        rows[layer] = _changed(rows[layer], {expert: (None, worker)})
        costs[layer] -= saved
        left[worker] -= 1
        stale = {layer} | {other for other, (_, _, there) in best.items() if not left[there]}
    return tuple(rows), True


def _candidates(
    problem: PlacementProblem, layer: int, row: Row, cost: float, left: np.ndarray
) -> Iterator[tuple[float, int, int]]:
    """Yield seconds saved, expert and worker: of each node, the worker with most free slots."""
    nodes = problem.links.worker_nodes
    for expert in map(int, _hottest_first(problem, layer, row)[:_HOTTEST]):
        taken = set(row[expert])
        for node in dict.fromkeys(nodes):
            free = [n for n, n_node in enumerate(nodes) if n_node == node and left[n] > 0 and n not in taken]
            if free:
                worker = max(free, key=lambda n: left[n])
                with_it = problem.replicated_layer_cost(layer, _changed(row, {expert: (None, worker)}))
                yield cost - with_it, expert, worker


def replace_replicas(
    problem: PlacementProblem, layer: int, row: Row, prices: Floats, counts: Ints, deadline: float
) -> Row:
    """Improve a layer's placement, which may have replicas.

    Args:
        problem: A problem that allows replicas.
        prices: [E][N] seconds of a step that it costs to have an expert on a worker; 0 where it is.
        counts: [N] experts that each worker holds over all layers; kept up to date.
        deadline: Value of `time.perf_counter` at which to stop.
    """

    def score(changed: Row) -> float:
        paid = sum(float(prices[expert, list(workers)].sum()) for expert, workers in enumerate(changed))
        return problem.replicated_layer_cost(layer, changed) + paid

    best, going = score(row), True
    while going:
        going = False
        for expert in _hottest_first(problem, layer, row)[:_HOTTEST]:
            if time.perf_counter() > deadline:
                return row
            changes = [*_changes(problem, layer, row, int(expert), counts)]
            scores = [score(changed) for changed in changes]
            if scores and min(scores) < best * (1 - LEAST_GAIN):
                best, new = min(scores), changes[int(np.argmin(scores))]
                counts += held((new,), problem.workers) - held((row,), problem.workers)
                row, going = new, True
                break
    return row


def _changes(problem: PlacementProblem, layer: int, row: Row, expert: int, counts: Ints) -> Iterator[Row]:
    """Yield the rows that one change brings an expert to another worker by."""
    coldest_first = _hottest_first(problem, layer, row)[::-1]
    for worker in range(problem.workers):
        if worker in row[expert]:
            continue
        if counts[worker] < problem.capacities[worker]:
            yield _changed(row, {expert: (None, worker)})
            for old in row[expert]:
                yield _changed(row, {expert: (old, worker)})
        cold = next((int(e) for e in coldest_first if worker in row[e]), None)
        if cold is None:
            continue
        if len(row[cold]) > 1:
            yield _changed(row, {expert: (None, worker), cold: (worker, None)})
        for old in row[expert]:
            if old not in row[cold]:
                yield _changed(row, {expert: (old, worker), cold: (worker, old)})
