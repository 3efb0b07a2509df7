"""A placement that a search changes expert by expert, with what each change would cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem

Counts = NDArray[np.int16]

_TIE = 1e-5
"""Weight of the root mean square of all links: among equally slow layers, the one with less on its other links."""


class SearchState:
    """One worker for each expert, and the layers' visits and rows.

    Args:
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
        self._known: tuple[int, tuple[Floats, Floats, Floats | None]] | None = (
            None  # of the layer asked for last
        )
        self._reached: list[Counts] = []  # [J][N] experts of each set on each worker
        self._weighted: list[sparse.csr_matrix] = []  # [E][J] weights of the sets that have an expert
        for layer, routed in enumerate(problem.sets or ()):
            at = owners[layer][routed.members] + np.arange(len(routed.weights))[:, None] * problem.workers
            counts = np.bincount(at.ravel(), minlength=len(routed.weights) * problem.workers)
            self._reached.append(counts.reshape(-1, problem.workers).astype(np.int16))
            self._weighted.append(routed.weighted(problem.experts))
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
        self._known = None
        self._rows[layer] = self.problem.rows(layer, self.owners[layer])
        if self.problem.sets is None:
            self._visits[layer] = self._rows[layer]
        else:
            self._visits[layer] = self.problem.sets[layer].weights @ (self._reached[layer] > 0)
        times = self._matrix @ self._visits[layer]
        self.scores[layer] = self._score(times, self._rows[layer] * self.problem.compute_seconds)

    def _score(self, times: Floats, computes: Floats) -> Floats:
        """[...] scores of layers with these seconds: [links, ...] and [N, ...]."""
        slowest = self.problem.transfer_seconds(times)
        others = np.sqrt(np.einsum("i...,i...->...", times, times) / len(times))
        return np.asarray(slowest + computes.max(axis=0) + _TIE * others)

    def move(self, layer: int, expert: int, worker: int) -> None:
        """Place an expert on another worker."""
        old = self.owners[layer, expert]
        if self._reached:
            has = self._weighted[layer][expert].indices  # the sets that have it
            self._reached[layer][has, old] -= 1
            self._reached[layer][has, worker] += 1
        self.owners[layer, expert] = worker
        self.counts[old] -= 1
        self.counts[worker] += 1
        self._refresh(layer)

    def exchange(self, layer: int, expert: int, other: int) -> None:
        """Exchange the workers of two experts of a layer."""
        first, second = int(self.owners[layer, expert]), int(self.owners[layer, other])
        self.move(layer, expert, second)
        self.move(layer, other, first)

    def change(self, layer: int, experts: Ints, least: float, prices: Floats | None = None) -> bool:
        """Make the best move of one of the experts to a worker with room, or exchange with another one of the layer.

        Args:
            least: Score that the layer must be below, with what is paid; else nothing changes.
            prices: [E][N] what it costs to have an expert on a worker, in seconds of the layer; None: nothing.

        Returns:
            Whether something changed.
        """
        moves, swaps = self.move_scores(layer, experts), self.swap_scores(layer, experts)
        owners = self.owners[layer]
        if prices is not None:
            paid = prices[np.arange(len(owners)), owners]
            moves = moves + prices[experts] - paid[experts, None]
            swaps += prices[experts][:, owners] - paid[experts, None]
            swaps += prices[:, owners[experts]].T - paid
        moves = np.where(self.room, moves, np.inf)
        move, swap = (np.unravel_index(scores.argmin(), scores.shape) for scores in (moves, swaps))
        if min(moves[move], swaps[swap]) >= least:
            return False
        if moves[move] <= swaps[swap]:
            self.move(layer, int(experts[move[0]]), int(move[1]))
        else:
            self.exchange(layer, int(experts[swap[0]]), int(swap[1]))
        return True

    def critical(self, layer: int) -> Ints:
        """Experts on workers that use a slowest link of the layer or compute longest: others gain nothing by moving."""
        times = self._matrix @ self._visits[layer]
        used = np.zeros(self.problem.workers, dtype=bool)
        starts = (*self.problem.groups, len(times))
        for first, last in zip(starts[:-1], starts[1:], strict=True):
            slowest = times[first:last] >= times[first:last].max() * (1 - 1e-9)
            used |= self._matrix[first:last][slowest].any(axis=0)
        answers = self.problem.shared_answers(times)
        worst = answers * (1 + np.argsort(np.argsort(-answers)))
        if worst.max() >= times[starts[-2] :].max():
            used |= answers >= answers[worst.argmax()]
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
        if self._known is None or self._known[0] != layer:
            self._known = (layer, self._find_changes(layer))
        return self._known[1]

    def _find_changes(self, layer: int) -> tuple[Floats, Floats, Floats | None]:
        if self.problem.sets is None:
            access = self.problem.access[layer]
            return access, np.broadcast_to(access[:, None], (len(access), self.problem.workers)), None
        sets, experts = self.problem.sets[layer], self.problem.experts
        reached = self._reached[layer]
        at_owner = np.take_along_axis(reached, self.owners[layer][sets.members], axis=1)
        alone = np.where(
            at_owner == 1, sets.weights[:, None], 0.0
        )  # [J][K] the set leaves the worker with the expert
        pairs = sets.members[:, :, None] * experts + sets.members[:, None, :]
        weights = np.broadcast_to(alone[:, :, None], pairs.shape)
        kept = np.bincount(pairs.ravel(), weights.ravel(), minlength=experts**2).reshape(experts, experts)
        gained = self._weighted[layer] @ (reached == 0).astype(np.float64)
        return (
            np.asarray(kept.diagonal(), dtype=np.float64),
            np.asarray(gained),
            np.asarray(kept, dtype=np.float64),
        )

    def move_scores(self, layer: int, experts: Ints) -> Floats:
        """[experts][N] score of the layer with each of the experts on each worker."""
        lost, gained, _ = self._changes(layer)
        access, source = self.problem.access[layer][experts], self.owners[layer][experts]
        matrix = self._matrix
        base = (matrix @ self._visits[layer])[:, None] - matrix[:, source] * lost[experts]
        times = base[:, :, None] + matrix[:, None, :] * gained[experts]
        rows = np.zeros((1, 1, 1))
        if self._computes:
            each, workers = np.arange(len(experts)), np.arange(self.problem.workers)
            rows = np.empty((len(workers), len(experts), len(workers)))
            rows[:] = self._rows[layer][:, None, None]
            rows[source, each] -= access[:, None]
            rows[workers, :, workers] += access
            rows *= self.problem.compute_seconds[:, None, None]
        scores = self._score(times, rows)
        scores[np.arange(len(experts)), source] = self.scores[layer]
        return scores

    def swap_scores(self, layer: int, experts: Ints) -> Floats:
        """[experts][E] score of the layer with two experts' workers exchanged; infinite for two of one worker."""
        lost, gained, kept = self._changes(layer)
        access, owners = self.problem.access[layer], self.owners[layer]
        sources, every = owners[experts], np.arange(self.problem.experts)
        here = gained[:, sources].T - lost[experts, None]  # [experts][E] change at the worker of the first
        there = gained[experts][:, owners] - lost
        if kept is not None:
            here, there = here + kept[experts], there + kept[:, experts].T
        matrix = self._matrix
        times = (matrix @ self._visits[layer])[:, None, None] + matrix[:, sources][:, :, None] * here
        times += matrix[:, owners][:, None, :] * there
        rows = np.zeros((1, 1, 1))
        if self._computes:
            more, each = access - access[experts, None], np.arange(len(experts))
            rows = np.empty((self.problem.workers, *more.shape))
            rows[:] = self._rows[layer][:, None, None]
            rows[sources, each] += more
            rows[owners, each[:, None], every] -= more
            rows *= self.problem.compute_seconds[:, None, None]
        scores = self._score(times, rows)
        scores[sources[:, None] == owners] = np.inf
        return scores
