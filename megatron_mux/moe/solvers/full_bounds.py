"""Lower bounds of the full objective, as linear programs for HiGHS.

With a master, workers that the topology does not tell apart are taken together, and experts may be divided among them.
Without one, what counts is the share of a token's experts that has a copy in its sender's own part of the topology: a
node, or a worker. Both count a token's visits from below: for its most frequent sets, at least what the most absent
expert of the set needs; for the others, the mean over the experts of a set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement_cost import PlacementProblem
from megatron_mux.moe.solvers.paper_lp import worker_classes

_MOST_SETS = 6_000
"""Sets of all layers, times classes of workers, that have variables of their own."""

_COVERED = 0.5
"""Share of the tokens that these sets must cover: of many rare sets, some would cost time and tighten little."""


def full_bound(problem: PlacementProblem, seconds: float) -> float:
    """Return a lower bound of the seconds of a step, of placements with and without replicas.

    Args:
        problem: A problem with the objective `full`.
        seconds: Time limit of each linear program; one that is not solved by then counts as 0.
    """
    compute = _least_compute(problem)
    if not problem.link_seconds.any():
        return compute
    if not problem.allows_replicas:
        return max(compute, _with_master(problem, seconds))
    links = problem.links
    nodes = [links.worker_nodes.index(node) for node in links.worker_nodes]
    parts = [nodes, list(range(problem.workers))]
    return compute + max(_without_master(problem, part, seconds) for part in parts)


def _least_compute(problem: PlacementProblem) -> float:
    """Seconds of all layers' compute if it could be divided at will."""
    if not problem.compute_seconds.all():
        return 0.0
    return float(problem.access.sum() / (1.0 / problem.compute_seconds).sum())


@dataclass
class _Program:
    """A linear program that is written row by row; minimizes the sum of `costs` times the variables."""

    costs: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    _rows: list[tuple[Sequence[int] | Ints, Sequence[float]]] = field(default_factory=list)
    _limits: list[float] = field(default_factory=list)

    def add(self, count: int, cost: float = 0.0, least: float = 0.0, most: float = np.inf) -> Ints:
        """Add variables; returns their indices."""
        first = len(self.costs)
        self.costs += [cost] * count
        self.least += [least] * count
        self.most += [most] * count
        return np.arange(first, first + count)

    def at_most(self, variables: Sequence[int] | Ints, factors: Sequence[float], limit: float = 0.0) -> None:
        """Add a row: the sum of factors times variables is at most the limit."""
        self._rows.append((variables, factors))
        self._limits.append(limit)

    def solve(self, seconds: float) -> float:
        """Return the minimum, or minus infinity if it is not found in time."""
        indices = np.concatenate([np.asarray(variables) for variables, _ in self._rows])
        values = np.concatenate([np.asarray(factors, dtype=np.float64) for _, factors in self._rows])
        starts = np.cumsum([0, *(len(variables) for variables, _ in self._rows)])
        matrix = sparse.csr_matrix((values, indices, starts), shape=(len(self._rows), len(self.costs)))
        result = linprog(
            self.costs,
            A_ub=matrix,
            b_ub=self._limits,
            bounds=np.stack([self.least, self.most], axis=1),
            method="highs",
            options={"time_limit": max(0.1, seconds)},
        )
        return float(result.fun) if result.status == 0 else -np.inf


def _frequent(problem: PlacementProblem, layer: int, most: int) -> tuple[list[Ints], Floats, Floats]:
    """The most frequent sets of a layer, their weights, and [E] the marginals of all other sets."""
    sets = (problem.sets or ())[layer]
    distinct, inverse = np.unique(np.sort(sets.members, axis=1), axis=0, return_inverse=True)
    weights = np.asarray(np.bincount(inverse.ravel(), sets.weights), dtype=np.float64)
    order = np.argsort(-weights, kind="stable")[:most]
    if weights[order].sum() < _COVERED:
        order = order[:0]
    chosen = [distinct[i] for i in order]
    rest = sets.marginals(problem.experts)
    for members, weight in zip(chosen, weights[order], strict=True):
        rest[members] -= weight
    return chosen, weights[order], np.asarray(np.maximum(rest, 0.0))


def _with_master(problem: PlacementProblem, seconds: float) -> float:
    scale = 1.0 / float(problem.link_seconds.max())  # variables of the order of 1
    matrix, compute = problem.link_seconds * scale, problem.compute_seconds * scale
    inside = [np.diag(part[: problem.workers]) for part in _parts(matrix, problem.groups)]
    classes = worker_classes(np.stack([*inside, compute, problem.links.away[0]], axis=1))
    sizes = [len(members) for members in classes]
    program = _Program()
    held: list[list[int]] = [[] for _ in classes]
    most = _MOST_SETS // (problem.layers * len(classes))
    top_k = (problem.sets or ())[0].members.shape[1]
    for layer in range(problem.layers):
        access = problem.access[layer]
        here = np.stack([program.add(problem.experts, most=1.0) for _ in classes])  # [classes][E]
        for expert in range(problem.experts):
            program.at_most(here[:, expert], [-1.0] * len(classes), -1.0)
        visits = program.add(len(classes))
        hottest = (problem.sets or ())[layer].marginals(problem.experts).max()
        chosen, weights, rest = _frequent(problem, layer, most)
        for index in range(len(classes)):
            held[index] += list(here[index])
            reached = program.add(len(chosen))
            for variable, members in zip(reached, chosen, strict=True):
                for expert in members:
                    program.at_most([here[index, expert], variable], [1.0, -1.0])
            row = [*reached, *here[index], visits[index]]
            program.at_most(row, [*weights, *(rest / top_k), -1.0])
        for part, direct in zip(_parts(matrix, problem.groups), inside, strict=True):
            slowest = program.add(1, cost=1.0, least=float(direct.min() * hottest))
            for factors in _class_rows(part, classes, sizes, direct):
                program.at_most([*visits, slowest[0]], [*factors, -1.0])
        if compute.any():
            longest = program.add(1, cost=1.0, least=float(compute.min() * access.max()))
            for index, members in enumerate(classes):
                row = access * compute[members].min() / sizes[index]
                program.at_most([*here[index], longest[0]], [*row, -1.0])
    for index, members in enumerate(classes):
        program.at_most(held[index], [1.0] * len(held[index]), float(problem.capacities[members].sum()))
    return program.solve(seconds) / scale


def _parts(matrix: Floats, groups: tuple[int, ...]) -> list[Floats]:
    """Rows of each group of links; the first N of each are those of single workers."""
    return [matrix[first:last] for first, last in zip(groups, (*groups[1:], len(matrix)), strict=True)]


def _class_rows(part: Floats, classes: list[Ints], sizes: list[int], direct: Floats) -> list[list[float]]:
    """Factors of the classes' visits in a group of links: of single workers, and of shared links taken together.

    Links whose seconds are the same in another order are replaced by their mean, which the slowest is not below.
    """
    rows = []
    for index, members in enumerate(classes):
        row = [0.0] * len(classes)
        row[index] = float(direct[members].min()) / sizes[index]
        rows.append(row)
    shared = part[len(direct) :]
    if len(shared):
        for alike in worker_classes(np.sort(shared, axis=1)):
            mean = shared[alike].mean(axis=0)
            rows.append([float(mean[members].min()) for members in classes])
    return rows


def _without_master(problem: PlacementProblem, part_of: Sequence[int], seconds: float) -> float:
    """A bound from what leaves the parts of the topology.

    Args:
        part_of: [N] part of each worker.
    """
    links = problem.links
    parts = np.array(part_of)
    leaves = parts[:, None] != parts[None, :]
    if not leaves.any():
        return 0.0
    total = float(links.bytes_sent.sum())
    outward, inward = (float(links_of[leaves].sum()) for links_of in (links.outward, links.inward.T))
    if set(links.worker_nodes) <= set(links.shared) and len(set(part_of)) == len(set(links.worker_nodes)):
        up, down = (sum(links.shared[node][i] for node in set(links.worker_nodes)) for i in (0, 1))
        outward, inward = min(outward, up, down), min(inward, up, down)
    # The slowest link takes at least all bytes over the sum of bandwidths, in each of two transfers to either side.
    price = 2.0 * total * (1.0 / outward + 1.0 / inward)
    share = max(float(links.bytes_sent[parts == part].sum()) for part in set(part_of)) / total
    program = _Program()
    copies: list[int] = []
    most = _MOST_SETS // problem.layers
    constant = 0.0
    top_k = (problem.sets or ())[0].members.shape[1]
    for layer in range(problem.layers):
        local = program.add(problem.experts, most=1.0)  # share of tokens with a copy in their own part
        held = program.add(problem.experts, least=1.0)
        copies += list(held)
        for variable, copy in zip(local, held, strict=True):
            program.at_most([variable, copy], [1.0, -share])
        chosen, weights, rest = _frequent(problem, layer, most)
        for weight, members in zip(weights, chosen, strict=True):
            away = program.add(1, cost=float(weight))
            for expert in members:
                program.at_most([local[expert], away[0]], [-1.0, -1.0], -1.0)
        for variable, weight in zip(local, rest, strict=True):
            program.costs[variable] -= weight / top_k
        constant += float(rest.sum()) / top_k
    program.at_most(copies, [1.0] * len(copies), float(problem.capacities.sum()))
    return max(0.0, program.solve(seconds) + constant) * price
