"""Local search: experts move, or exchange workers within a layer or between two layers, while that helps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem
from megatron_mux.moe.solvers.baselines import shuffled
from megatron_mux.moe.solvers.search_state import SearchState

_AT_ONCE = 150_000
"""Numbers in the arrays that candidates are compared in."""

_OPTIMAL = 1e-9
"""Relative distance to a lower bound that counts as none."""

_LEAST_GAIN = 1e-10
"""Share of a layer's seconds that a change must gain."""

_SMALL, _RESTARTS = 150, 12
"""Layers x experts x workers up to which the search starts again, and how often."""


def improve(
    problem: PlacementProblem, owners: Ints, deadline: float, bound: float = 0.0
) -> tuple[Ints, bool]:
    """Improve a placement until no single change helps.

    Args:
        owners: [L][E] placement that fits the capacities.
        deadline: Value of `time.perf_counter` at which to stop.
        bound: A lower bound of the objective; a placement that has reached it is left as it is.

    Returns:
        The placement, never worse than `owners`, and whether the search ended before the deadline.
    """
    state = SearchState(problem, owners)
    before = state.cost
    finished = _Search(state, deadline, bound).run()
    return (state.owners, finished) if state.cost <= before else (owners, finished)


def improve_small(
    problem: PlacementProblem, owners: Ints, deadline: float, bound: float = 0.0
) -> tuple[Ints, bool]:
    """Like `improve`, and for small models also from random placements: there, single changes often get stuck."""
    best, finished = improve(problem, owners, deadline, bound)
    if problem.access.size * problem.workers > _SMALL:
        return best, finished
    cost = problem.cost(best)
    for seed in range(_RESTARTS):
        if cost <= bound * (1 + _OPTIMAL):
            break
        other, ended = improve(problem, shuffled(problem, seed), deadline, bound)
        finished &= ended
        if problem.cost(other) < cost:
            best, cost = other, problem.cost(other)
    return best, finished


class _Search:
    """The changes of a search."""

    def __init__(self, state: SearchState, deadline: float, bound: float) -> None:
        self.state = state
        self.deadline = deadline
        self.bound = bound
        problem = state.problem
        self._cheapest = np.zeros((problem.layers, problem.workers, problem.workers))
        self._which = np.zeros(self._cheapest.shape, dtype=np.int64)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    @property
    def optimal(self) -> bool:
        return self.state.cost <= self.bound * (1 + _OPTIMAL)

    def run(self) -> bool:
        """Improve layers by themselves, then pairs of layers; returns whether that ended before the deadline."""
        if self.optimal:
            return True
        for layer in range(self.state.problem.layers):
            self._improve_layer(layer)
        if self.late:
            return False
        for layer in range(self.state.problem.layers):
            self._price(layer)
        while not self.late:
            changed = self._exchange()
            if not changed or self.optimal:
                return True
            for layer in changed:
                self._improve_layer(layer)
                self._price(layer)
        return False

    def _improve_layer(self, layer: int) -> None:
        while not self.late and self._change(layer):
            pass

    def _change(self, layer: int) -> bool:
        """Apply the best change within a layer, of many experts of the first that help; returns False if none does."""
        state = self.state
        least = state.scores[layer] * (1 - _LEAST_GAIN)
        return any(state.change(layer, experts, least) for experts in self._portions(state.critical(layer)))

    def _portions(self, experts: Ints) -> Iterator[Ints]:
        problem = self.state.problem
        links = len(problem.link_seconds) + (problem.workers if problem.compute_seconds.any() else 0)
        size = max(1, _AT_ONCE // (max(problem.experts, problem.workers) * links))
        for first in range(0, len(experts), size):
            yield experts[first : first + size]

    def _price(self, layer: int) -> None:
        """Find, for each two workers, the expert that costs least to move from the first to the second."""
        state = self.state
        every = np.arange(state.problem.experts)
        scores = np.concatenate([state.move_scores(layer, part) for part in self._portions(every)])
        self._cheapest[layer] = np.inf
        for worker in range(state.problem.workers):
            mine = np.flatnonzero(state.owners[layer] == worker)
            if len(mine):
                best = scores[mine].argmin(axis=0)
                self._which[layer, worker] = mine[best]
                self._cheapest[layer, worker] = scores[mine[best], np.arange(len(best))] - state.scores[layer]
                self._cheapest[layer, worker, worker] = np.inf

    def _exchange(self) -> tuple[int, ...]:
        """Move an expert of one layer from worker to worker, and one of another layer back.

        Returns:
            The layers that changed; none if no such change helps.
        """
        state = self.state
        prices = self._cheapest
        alone = np.where(state.room, prices, np.inf)  # a move within one layer, where there is room
        pairs, first, second = _two_layers(prices)
        least = -_LEAST_GAIN * float(state.scores.mean())
        if min(alone.min(), pairs.min()) >= least:
            return ()
        if alone.min() <= pairs.min():
            layer, source, target = map(int, np.unravel_index(alone.argmin(), alone.shape))
            state.move(layer, int(self._which[layer, source, target]), target)
            return (layer,)
        source, target = map(int, np.unravel_index(pairs.argmin(), pairs.shape))
        expert, other = int(first[source, target]), int(second[source, target])
        state.move(expert, int(self._which[expert, source, target]), target)
        state.move(other, int(self._which[other, target, source]), source)
        return (expert, other)


def _two_layers(prices: Floats) -> tuple[Floats, Ints, Ints]:
    """For each two workers, the cheapest move from the first to the second with one back in another layer.

    Args:
        prices: [L][N][N] price of the cheapest move from worker to worker in each layer.

    Returns:
        [N][N] the sum, the layer of the first move, the layer of the second.
    """
    layers = len(prices)
    if layers == 1:
        none = np.zeros(prices.shape[1:], dtype=np.int64)
        return np.full(prices.shape[1:], np.inf), none, none
    order = np.argpartition(prices, 1, axis=0)[:2]
    values = np.take_along_axis(prices, order, axis=0)
    swapped = values[0] > values[1]
    order = np.where(swapped, order[::-1], order)
    values = np.where(swapped, values[::-1], values)
    back_order, back_values = order.transpose(0, 2, 1), values.transpose(0, 2, 1)
    best = np.full(prices.shape[1:], np.inf)
    first, second = order[0].copy(), back_order[0].copy()
    for i, j in ((0, 0), (0, 1), (1, 0)):
        total = np.where(order[i] == back_order[j], np.inf, values[i] + back_values[j])
        better = total < best
        best = np.where(better, total, best)
        first, second = np.where(better, order[i], first), np.where(better, back_order[j], second)
    return best, first, second
