"""Our solver of the paper's objective: exact numbers of slots for each layer, then local search."""

from __future__ import annotations

import heapq

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem
from megatron_mux.moe.solvers.layer_counts import (
    MOST_TRIED,
    Kinds,
    SetTable,
    choose_counts,
    least_seconds,
)
from megatron_mux.moe.solvers.local_search import improve_small
from megatron_mux.moe.solvers.paper_lp import relax, round_shares, worker_classes
from megatron_mux.moe.solvers.search_state import SearchState


def solve_paper(problem: PlacementProblem, deadline: float) -> tuple[Ints, float, bool]:
    """Minimize the paper's (8) under (9) to (11).

    Args:
        problem: A problem with the objective `vela`.
        deadline: Value of `time.perf_counter` at which to stop.

    Returns:
        [L][E] workers, a lower bound of the objective, and whether the search ended before the deadline.
    """
    seconds = np.diag(problem.link_seconds)
    classes = sorted(worker_classes(seconds), key=lambda members: seconds[members[0]])
    if len(classes) > 2:
        hottest = problem.access.max(axis=1) * seconds.min()
        relaxed = relax(problem, hottest)
        owners, bound = round_shares(relaxed.shares, problem.capacities), relaxed.value
    else:
        owners, bound = _from_counts(problem, seconds, classes)
    owners, finished = improve_small(problem, owners, deadline, bound)
    return owners, bound, finished


def _from_counts(problem: PlacementProblem, seconds: Floats, classes: list[Ints]) -> tuple[Ints, float]:
    """Choose how many experts of each layer are on fast workers, and place them; returns workers and a lower bound."""
    fast, slow = classes[0], classes[1] if len(classes) > 1 else np.zeros(0, dtype=np.int64)
    kinds = Kinds(
        len(fast), len(slow), float(seconds[fast[0]]), float(seconds[slow[0]]) if len(slow) else 1.0
    )
    room = [int(problem.capacities[members].sum()) for members in (fast, slow)]
    if problem.experts <= MOST_TRIED:
        table = SetTable(problem.access, kinds)
        counts, bound = choose_counts(table.seconds(), *room)
        divided = [table.divide(layer, int(count)) for layer, count in enumerate(counts)]
    else:
        counts, bound = choose_counts(least_seconds(problem.access, kinds), *room)
        divided = [
            _pack(access, int(count), kinds) for access, count in zip(problem.access, counts, strict=True)
        ]
    return _fit(problem, _dealt(problem, divided, (fast, slow))), bound


_Parts = list[list[int]]
"""Experts of each worker of a kind."""


def _dealt(problem: PlacementProblem, divided: list[tuple[_Parts, _Parts]], kinds: tuple[Ints, Ints]) -> Ints:
    """[L][E] workers: larger parts of a layer to workers with more room left; capacities may be exceeded.

    Args:
        divided: [L] parts of fast and of slow workers.
    """
    owners = np.empty((problem.layers, problem.experts), dtype=np.int64)
    left = problem.capacities.astype(np.float64)

    def unevenness(layer: int) -> int:
        return max(max(map(len, parts)) - min(map(len, parts)) for parts in divided[layer] if parts)

    for layer in sorted(
        range(problem.layers), key=unevenness, reverse=True
    ):  # even layers make up for the others
        for members, parts in zip(kinds, divided[layer], strict=True):
            by_room = members[np.argsort(-left[members], kind="stable")]
            for worker, part in zip(by_room, sorted(parts, key=len, reverse=True), strict=True):
                owners[layer, part] = worker
                left[worker] -= len(part)
    return owners


def _fit(problem: PlacementProblem, owners: Ints) -> Ints:
    """Make a placement keep to the capacities: exchange whole parts of equal workers, else move what costs least."""
    state = SearchState(problem, owners)
    seconds = np.diag(problem.link_seconds)
    every = np.arange(problem.experts)
    while (excess := state.counts - problem.capacities).max() > 0:
        over = int(excess.argmax())
        if _exchange_parts(state, over, excess, seconds):
            continue
        best: tuple[float, int, int, int] | None = None
        for layer in range(problem.layers):
            mine = every[state.owners[layer] == over]
            if len(mine):
                scores = np.where(state.room, state.move_scores(layer, mine), np.inf) - state.scores[layer]
                at, worker = map(int, np.unravel_index(scores.argmin(), scores.shape))
                if best is None or scores[at, worker] < best[0]:
                    best = (float(scores[at, worker]), layer, int(mine[at]), worker)
        if best is None:
            raise RuntimeError("no worker has room, although the capacities were checked")
        state.move(*best[1:])
    return state.owners


def _exchange_parts(state: SearchState, over: int, excess: Ints, seconds: Floats) -> bool:
    """Exchange, in one layer, all experts of a worker above its capacity with those of an equally fast one below it."""
    for under in np.flatnonzero((seconds == seconds[over]) & (excess < 0)):
        mine, theirs = (state.owners == over).sum(axis=1), (state.owners == under).sum(axis=1)
        more = mine - theirs
        useful = (more > 0) & (more <= max(1, min(excess[over], -excess[under])))
        if useful.any():
            layer = int(np.where(useful, more, 0).argmax())
            first, second = (np.flatnonzero(state.owners[layer] == worker) for worker in (over, under))
            for expert in first:
                state.move(layer, int(expert), int(under))
            for expert in second:
                state.move(layer, int(expert), over)
            return True
    return False


def _pack(access: Floats, count: int, kinds: Kinds) -> tuple[_Parts, _Parts]:
    """Divide a layer's experts, the hottest first to the worker with the least load."""
    hot = np.argsort(-access, kind="stable")
    taken = _for_fast(access[hot], count, kinds)
    owners = []
    for workers, experts in ((kinds.fast, hot[taken]), (kinds.slow, hot[~taken])):
        parts: _Parts = [[] for _ in range(workers)]
        loads = [(0.0, worker) for worker in range(workers)]
        for expert in experts:
            load, worker = heapq.heappop(loads)
            parts[worker].append(int(expert))
            heapq.heappush(loads, (load + float(access[expert]), worker))
        owners.append(parts)
    return owners[0], owners[1]


def _for_fast(hot: Floats, count: int, kinds: Kinds) -> np.ndarray:
    """[E] which experts go to fast workers: as many of the hottest as balance both kinds, then the coldest.

    Args:
        hot: [E] probabilities, falling.
    """
    experts = len(hot)
    if not kinds.slow:
        return np.ones(experts, dtype=bool)
    sums = np.concatenate([[0.0], np.cumsum(hot)])
    hottest = np.arange(count + 1)
    load = sums[hottest] + sums[-1] - sums[experts - (count - hottest)]
    time_fast = load * kinds.fast_seconds / kinds.fast
    time_slow = (sums[-1] - load) * kinds.slow_seconds / kinds.slow
    best = int(np.maximum(time_fast, time_slow).argmin())
    chosen = np.zeros(experts, dtype=bool)
    chosen[:best] = True
    chosen[experts - (count - best) :] = True
    return chosen
