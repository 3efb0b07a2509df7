"""Improving a layer with replicas that is in force, by changes that are worth their price.

A hot expert gets a copy on another worker: in a free slot, or in the place of the coldest expert there, if that one has
other copies; or one of its copies moves there, or exchanges workers with the coldest one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement import held
from megatron_mux.moe.placement_cost import PlacementProblem

_HOTTEST = 8
"""Experts of a layer that are tried: those with most rows per copy."""
_LEAST = 1e-9
"""Share of a layer's seconds that a change must gain beyond its price."""

Row = tuple[tuple[int, ...], ...]


def replace_replicas(
    problem: PlacementProblem, layer: int, row: Row, prices: Floats, counts: Ints, deadline: float
) -> Row:
    """Improve a layer's placement, which may have replicas.

    Args:
        problem: A problem that allows replicas.
        row: [E] the workers of each expert.
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
            if scores and min(scores) < best * (1 - _LEAST):
                best, new = min(scores), changes[int(np.argmin(scores))]
                counts += held((new,), problem.workers) - held((row,), problem.workers)
                row, going = new, True
                break
    return row


def _hottest_first(problem: PlacementProblem, layer: int, row: Row) -> Ints:
    return np.argsort(-_per_copy(problem, layer, row), kind="stable")


def _per_copy(problem: PlacementProblem, layer: int, row: Row) -> Floats:
    """[E] how often a token selects an expert, divided by its copies."""
    return np.asarray(problem.access[layer] / [len(workers) for workers in row])


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


def _changed(row: Row, changes: dict[int, tuple[int | None, int | None]]) -> Row:
    """The row with, for some experts, a worker that it leaves and one that it comes to."""
    changed = list(row)
    for expert, (old, new) in changes.items():
        workers = {*row[expert]} - {old} | {new}
        changed[expert] = tuple(sorted(worker for worker in workers if worker is not None))
    return tuple(changed)
