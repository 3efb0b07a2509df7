"""The paper's solver: the linear program of its section IV-B, and its rounding in three steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem

_LARGEST = 60_000
"""Variables up to which the program is solved as the paper writes it; above, equal workers are first taken together."""


@dataclass(frozen=True)
class Relaxed:
    """A solution of the linear program.

    Attributes:
        shares: [L][E][N] the relaxed X.
        value: Its objective, a lower bound of that of every placement without replicas.
    """

    shares: Floats
    value: float


def worker_classes(keys: Floats) -> list[Ints]:
    """Group workers with equal keys.

    Args:
        keys: [N] or [N][...] what workers of a class have in common, equal to 12 digits.

    Returns:
        Indices of the workers of each class.
    """
    flat = keys.reshape(len(keys), -1)
    scale = np.abs(flat).max(initial=0.0) or 1.0
    _, inverse = np.unique(np.round(flat / scale, 12), axis=0, return_inverse=True)
    return [np.flatnonzero(inverse.ravel() == i) for i in range(int(inverse.max()) + 1)]


def relax(problem: PlacementProblem, least: Floats | None = None) -> Relaxed:
    """Solve the paper's linear program with HiGHS.

    If workers of equal bandwidth are taken together, their shares are dealt out again one worker after the other, each
    up to its part of the load: that is again an optimum of the program, except that workers of one class may exceed
    their capacity where others of it have room.

    Args:
        problem: A problem with the objective `vela`.
        least: [L] further lower bounds of the layers' seconds; the paper has none.
    """
    seconds = np.diag(problem.link_seconds)
    least = np.zeros(problem.layers) if least is None else least
    if problem.access.size * problem.workers <= _LARGEST:
        return Relaxed(*_solve(problem.access, 1.0 / seconds, problem.capacities.astype(np.float64), least))
    classes = worker_classes(seconds)
    speeds = np.array([len(members) / seconds[members[0]] for members in classes])
    capacities = np.array([problem.capacities[members].sum() for members in classes], dtype=np.float64)
    shares, value = _solve(problem.access, speeds, capacities, least)
    return Relaxed(_deal(problem.access, shares, classes, problem.workers), value)


def _solve(access: Floats, speeds: Floats, capacities: Floats, least: Floats) -> tuple[Floats, float]:
    """Minimize the sum of lambda over layers; returns [L][E][workers] shares and the minimum.

    Args:
        access: [L][E] probabilities.
        speeds: [workers] access probability per second.
        capacities: [workers] experts.
        least: [L] lower bounds of lambda.
    """
    layers, experts = access.shape
    workers = len(speeds)
    count = layers * experts * workers  # variables x[l, e, n], then lambda[l]
    cells = np.arange(count).reshape(layers, experts, workers)
    lambdas = count + np.arange(layers)
    scale = access.sum() / layers / speeds.sum()  # lambda is of the order of 1
    loads = access[:, :, None] / speeds / scale
    one_worker = sparse.csr_matrix(
        (np.ones(count), (cells.ravel() // workers, cells.ravel())), shape=(layers * experts, count + layers)
    )
    load_rows = np.broadcast_to(np.arange(layers)[:, None, None] * workers + np.arange(workers), cells.shape)
    bounded = sparse.csr_matrix(
        (
            np.concatenate([loads.ravel(), np.full(layers * workers, -1.0), np.ones(count)]),
            (
                np.concatenate(
                    [
                        load_rows.ravel(),
                        np.arange(layers * workers),
                        layers * workers + cells.ravel() % workers,
                    ]
                ),
                np.concatenate([cells.ravel(), np.repeat(lambdas, workers), cells.ravel()]),
            ),
        ),
        shape=(layers * workers + workers, count + layers),
    )
    lower = np.concatenate([np.zeros(count), least / scale])
    upper = np.concatenate([np.ones(count), np.full(layers, np.inf)])
    result = linprog(
        np.concatenate([np.zeros(count), np.ones(layers)]),
        A_ub=bounded,
        b_ub=np.concatenate([np.zeros(layers * workers), capacities]),
        A_eq=one_worker,
        b_eq=np.ones(layers * experts),
        bounds=np.stack([lower, upper], axis=1),
        method="highs",
    )
    if result.x is None:  # the capacities were checked: a placement exists, and with it a solution
        raise RuntimeError(f"HiGHS did not solve the linear program: {result.message}")
    return result.x[:count].reshape(layers, experts, workers), float(result.fun) * scale


def _deal(access: Floats, shares: Floats, classes: list[Ints], workers: int) -> Floats:
    """[L][E][N] shares of single workers from [L][E][classes]: each worker takes experts until it has its load."""
    layers, experts = access.shape
    dealt = np.zeros((layers, experts, workers))
    for index, members in enumerate(classes):
        for layer in range(layers):
            order = np.roll(members, layer)  # another worker begins in each layer
            loads = access[layer] * shares[layer, :, index]
            ends = np.cumsum(loads)
            part = ends[-1] / len(members) if ends[-1] > 0 else 1.0
            for expert in np.flatnonzero(shares[layer, :, index] > 0):
                low, high = ends[expert] - loads[expert], ends[expert]
                first = min(int(low / part), len(members) - 1)
                if high <= low:
                    dealt[layer, expert, order[first]] += shares[layer, expert, index]
                    continue
                for position in range(first, len(members)):
                    upper = high if position == len(members) - 1 else min(high, (position + 1) * part)
                    piece = upper - max(low, position * part)
                    if piece > 0:
                        dealt[layer, expert, order[position]] += (
                            shares[layer, expert, index] * piece / (high - low)
                        )
                    if upper >= high:
                        break
    return dealt


def round_shares(shares: Floats, capacities: Ints) -> Ints:
    """Round a relaxed solution in the paper's three steps.

    1. Shares above 0.5 become 1. 2. A worker above its capacity gives up the experts with its lowest shares. 3. Each
    expert without a worker goes to the worker with room that has its highest share.

    Args:
        shares: [L][E][N] relaxed X.
        capacities: [N] experts over all layers.

    Returns:
        [L][E] workers.
    """
    layers, experts, workers = shares.shape
    flat = shares.reshape(-1, workers)
    owners = np.where(flat.max(axis=1) > 0.5, flat.argmax(axis=1), -1)
    for worker in range(workers):
        mine = np.flatnonzero(owners == worker)
        excess = len(mine) - int(capacities[worker])
        if excess > 0:
            owners[mine[np.argsort(flat[mine, worker], kind="stable")[:excess]]] = -1
    left = capacities - np.bincount(owners[owners >= 0], minlength=workers)
    for cell in np.flatnonzero(owners < 0):
        worker = int(np.where(left > 0, flat[cell], -1.0).argmax())
        owners[cell] = worker
        left[worker] -= 1
    return np.asarray(owners.reshape(layers, experts), dtype=np.int64)


def paper_placement(problem: PlacementProblem) -> tuple[Ints, float]:
    """Solve the paper's linear program and round it.

    Args:
        problem: A problem with the objective `vela`.

    Returns:
        [L][E] workers, and the program's value, a lower bound.
    """
    relaxed = relax(problem)
    return round_shares(relaxed.shares, problem.capacities), relaxed.value
