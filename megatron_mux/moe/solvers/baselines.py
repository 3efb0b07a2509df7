"""Placements that other systems use, which ours are compared with.

All keep to the workers' capacities, which are totals over layers: where a rule names a worker without room, the next
worker that has room takes the expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement import Placement
from megatron_mux.moe.placement_cost import PlacementProblem


def sequential(problem: PlacementProblem) -> Ints:
    """[L][E]: expert e on worker e mod N, as the paper's evaluation places experts."""
    return _by_rule(problem, [expert % problem.workers for expert in range(problem.experts)])


def contiguous(problem: PlacementProblem) -> Ints:
    """[L][E]: blocks of neighbouring experts, as frameworks with expert parallelism place them."""
    return _by_rule(
        problem, [expert * problem.workers // problem.experts for expert in range(problem.experts)]
    )


def shuffled(problem: PlacementProblem, seed: int = 0) -> Ints:
    """[L][E]: all experts of all layers in random order, dealt to the workers' slots (the paper's random placement)."""
    slots = np.repeat(np.arange(problem.workers), problem.capacities)
    drawn = np.random.default_rng(seed).permutation(slots)[: problem.layers * problem.experts]
    return np.asarray(drawn.reshape(problem.layers, problem.experts), dtype=np.int64)


def _by_rule(problem: PlacementProblem, rule: Sequence[int]) -> Ints:
    left = problem.capacities.copy()
    owners = np.empty((problem.layers, problem.experts), dtype=np.int64)
    for layer in range(problem.layers):
        for expert, worker in enumerate(rule):
            while not left[worker]:
                worker = (worker + 1) % problem.workers
            owners[layer, expert] = worker
            left[worker] -= 1
    return owners


def eplb(problem: PlacementProblem, replicas: bool, groups: int = 1, nodes: Sequence[str] = ()) -> Placement:
    """Balance load as DeepSeek's expert-parallelism load balancer does, from its public description.

    Spare slots are divided among layers. In each layer, the expert with the most load per copy is copied until no slot
    is left; then copies go, heaviest first, to the worker with the least load. If experts form as many groups as divide
    among the nodes, groups go to nodes first, in the same way, and experts to the workers of their group's node.

    Args:
        replicas: Whether experts may be copied.
        groups: Groups that experts are routed by, each of neighbouring experts.
        nodes: [N] node of each worker; needed for groups.
    """
    left = problem.capacities.copy()
    owners = []
    for layer in range(problem.layers):
        layers_left = problem.layers - layer
        spare = int(left.sum()) // layers_left - problem.experts if replicas else 0
        copies = _copies(problem.access[layer], problem.experts + max(0, spare), problem.workers)
        most = -(-left // layers_left)  # what a worker may take, so that later layers have room, too
        allowed = _nodes_of_groups(problem.access[layer], copies, most, groups, nodes)
        row = _pack(problem.access[layer] / copies, copies, left, most, allowed)
        left -= np.bincount([worker for workers in row for worker in workers], minlength=problem.workers)
        owners.append(row)
    return tuple(owners)


def _copies(load: Floats, slots: int, workers: int) -> Ints:
    """[E] copies of each expert: one each, and further ones for the most loaded."""
    copies = np.ones(len(load), dtype=np.int64)
    for _ in range(slots - len(load)):
        per_copy = np.where(copies < workers, load / copies, -1.0)
        if per_copy.max() < 0:
            break
        copies[per_copy.argmax()] += 1
    return copies


def _nodes_of_groups(
    load: Floats, copies: Ints, most: Ints, groups: int, nodes: Sequence[str]
) -> np.ndarray | None:
    """[E][N] whether an expert may be on a worker, with groups packed to nodes; None if groups cannot be."""
    names = list(dict.fromkeys(nodes))
    if groups <= 1 or len(names) <= 1 or groups % len(names) or len(load) % groups:
        return None
    size, per_node = len(load) // groups, groups // len(names)
    member = np.array([names.index(node) for node in nodes])
    loads, counts = np.zeros(len(names)), np.zeros(len(names), dtype=np.int64)
    of_group = np.empty(groups, dtype=np.int64)
    by_group = load.reshape(groups, size).sum(axis=1)
    for group in np.argsort(-by_group, kind="stable"):
        node = int(np.where(counts < per_node, loads, np.inf).argmin())
        of_group[group] = node
        loads[node] += by_group[group]
        counts[node] += 1
    allowed = np.asarray(np.repeat(of_group, size)[:, None] == member[None, :])
    room = np.array([most[member == node].sum() for node in range(len(names))])
    needed = np.bincount(np.repeat(of_group, size), copies, minlength=len(names))
    return allowed if (needed <= room).all() else None


def _pack(
    load: Floats, copies: Ints, left: Ints, most: Ints, allowed: np.ndarray | None
) -> tuple[tuple[int, ...], ...]:
    """[E] workers: copies, heaviest first, to the worker with the least load that has room and not the same expert."""
    row: list[list[int]] = [[] for _ in load]
    loads, room = np.zeros(len(left)), np.minimum(left, most)
    for expert in np.argsort(-load, kind="stable"):
        for copy in range(copies[expert]):
            free = (room > 0) & ~np.isin(np.arange(len(left)), row[expert])
            if allowed is not None and (free & allowed[expert]).any():
                free &= allowed[expert]
            if not free.any():
                if copy:
                    break
                free = left > np.bincount([w for workers in row for w in workers], minlength=len(left))
            worker = int(np.where(free, loads, np.inf).argmin())
            row[expert].append(worker)
            loads[worker] += load[expert]
            room[worker] -= 1
    return tuple(tuple(sorted(workers)) for workers in row)
