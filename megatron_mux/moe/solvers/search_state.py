"""A placement that a search changes expert by expert, with what each change would cost."""

from __future__ import annotations

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem

_TIE = 1e-5
"""Weight of the root mean square of all links: among equally slow layers, the one with less on its other links."""


class SearchState:
    """One worker for each expert, and the layers' visits and rows.

    Args:
        problem: The problem.
        owners: [L][E] first placement, which fits the capacities or does not; it is copied.

    Attributes:
        owners: [L][E] worker of each expert.
        counts: [N] experts of each worker.
        scores: [L] seconds of each layer, with a small term for links that are not the slowest.
    """

    def __init__(self, problem: PlacementProblem, owners: Ints) -> None:
        self.problem = problem
        self.owners = owners.copy()
        self.counts = np.bincount(owners.ravel(), minlength=problem.workers)
        self._matrix = problem.link_seconds
        self._computes = bool(problem.compute_seconds.any())
        self._reached: list[Floats] = []  # [J][N] experts of each set on each worker
        for layer, one in enumerate(problem.indicators):
            placed = np.zeros((problem.experts, problem.workers))
            placed[np.arange(problem.experts), owners[layer]] = 1.0
            self._reached.append(one @ placed)
        self._visits = np.zeros((problem.layers, problem.workers))
        self._rows = np.zeros_like(self._visits)
        self.scores = np.zeros(problem.layers)
        for layer in range(problem.layers):
            self._refresh(layer)

    @property
    def cost(self) -> float:
        """Seconds of a step."""
        return float(self.problem.seconds(self._visits, self._rows).sum())

    @property
    def room(self) -> np.ndarray:
        """[N] whether a worker can take one more expert."""
        return np.asarray(self.counts < self.problem.capacities)

    def _refresh(self, layer: int) -> None:
        self._rows[layer] = self.problem.rows(layer, self.owners[layer])
        if self.problem.sets is None:
            self._visits[layer] = self._rows[layer]
        else:
            self._visits[layer] = self.problem.sets[layer].weights @ (self._reached[layer] > 0.5)
        times = self._matrix @ self._visits[layer]
        self.scores[layer] = self._score(times, self._rows[layer] * self.problem.compute_seconds)

    def _score(self, times: Floats, computes: Floats) -> Floats:
        """[...] scores of layers with these seconds: [..., links] and [..., N]."""
        slowest = np.maximum.reduceat(times, self.problem.groups, axis=-1).sum(axis=-1)
        others = np.sqrt(np.einsum("...i,...i->...", times, times) / times.shape[-1])
        return np.asarray(slowest + computes.max(axis=-1) + _TIE * others)

    def move(self, layer: int, expert: int, worker: int) -> None:
        """Place an expert on another worker."""
        old = self.owners[layer, expert]
        if self._reached:
            has = self.problem.indicators[layer][:, expert]
            self._reached[layer][:, old] -= has
            self._reached[layer][:, worker] += has
        self.owners[layer, expert] = worker
        self.counts[old] -= 1
        self.counts[worker] += 1
        self._refresh(layer)

    def critical(self, layer: int) -> Ints:
        """Experts on workers that use a slowest link of the layer or compute longest: others gain nothing by moving."""
        times = self._matrix @ self._visits[layer]
        used = np.zeros(self.problem.workers, dtype=bool)
        starts = (*self.problem.groups, len(times))
        for first, last in zip(starts[:-1], starts[1:], strict=True):
            slowest = times[first:last] >= times[first:last].max() * (1 - 1e-9)
            used |= self._matrix[first:last][slowest].any(axis=0)
        if self._computes:
            seconds = self._rows[layer] * self.problem.compute_seconds
            used |= seconds >= seconds.max() * (1 - 1e-9)
        return np.flatnonzero(used[self.owners[layer]])

    def _changes(self, layer: int) -> tuple[Floats, Floats, Floats | None]:
        """What the visits change by if experts come and go.

        Returns:
            [E] what an expert's worker loses without it; [E][N] what each worker gains with it; and [E][E] what the
            worker of the first keeps in spite of losing it, because it gets the second (None: nothing).
        """
        if self.problem.sets is None:
            access = self.problem.access[layer]
            return access, np.broadcast_to(access[:, None], (len(access), self.problem.workers)), None
        has, weights = self.problem.indicators[layer], self.problem.sets[layer].weights
        reached = self._reached[layer]
        alone = has * (np.abs(reached[:, self.owners[layer]] - 1.0) < 0.5) * weights[:, None]
        gains = (has * weights[:, None]).T @ (reached < 0.5)
        return alone.sum(axis=0), gains, alone.T @ has

    def move_scores(self, layer: int, experts: Ints) -> Floats:
        """[experts][N] score of the layer with each of the experts on each worker."""
        lost, gained, _ = self._changes(layer)
        access, own = self.problem.access[layer][experts], self.owners[layer][experts]
        base = self._matrix @ self._visits[layer] - lost[experts, None] * self._matrix.T[own]
        times = base[:, None, :] + gained[experts][:, :, None] * self._matrix.T
        rows = np.zeros((1, 1, 1))
        if self._computes:
            each, workers = np.arange(len(experts)), np.arange(self.problem.workers)
            rows = np.tile(self._rows[layer], (len(experts), self.problem.workers, 1))
            rows[each, :, own] -= access[:, None]
            rows[:, workers, workers] += access[:, None]
            rows *= self.problem.compute_seconds
        scores = self._score(times, rows)
        scores[np.arange(len(experts)), own] = self.scores[layer]
        return scores

    def swap_scores(self, layer: int, experts: Ints) -> Floats:
        """[experts][E] score of the layer with two experts' workers exchanged; infinite for two of one worker."""
        lost, gained, kept = self._changes(layer)
        access, owners = self.problem.access[layer], self.owners[layer]
        own, every = owners[experts], np.arange(self.problem.experts)
        here = gained[:, own].T - lost[experts, None]  # [experts][E] change at the worker of the first
        there = gained[experts][:, owners] - lost
        if kept is not None:
            here, there = here + kept[experts], there + kept[:, experts].T
        columns = self._matrix.T
        times = self._matrix @ self._visits[layer] + here[:, :, None] * columns[own][:, None]
        times += there[:, :, None] * columns[owners]
        rows = np.zeros((1, 1, 1))
        if self._computes:
            more = access - access[experts, None]
            rows = np.tile(self._rows[layer], (len(experts), self.problem.experts, 1))
            each = np.arange(len(experts))
            rows[each, :, own] += more
            rows[each[:, None], every, owners] -= more
            rows *= self.problem.compute_seconds
        scores = self._score(times, rows)
        scores[own[:, None] == owners] = np.inf
        return scores
