"""Improving a placement that is in force: what experts gain by moving against what moving them costs.

Local search from the placement: an expert moves to a worker with room, or two of a layer exchange workers, as long as
the step's predicted seconds fall by more than the price of the moves; an expert that returns is free again. So as few
experts move as their gain pays for. Layers with replicas: see `replicas`.
"""

from __future__ import annotations

import time

import numpy as np

from megatron_mux.moe.entries import Floats, Ints
from megatron_mux.moe.placement import Placement, held, to_owners
from megatron_mux.moe.placement_cost import PlacementProblem
from megatron_mux.moe.solvers.replicas import LEAST_GAIN, replace_replicas
from megatron_mux.moe.solvers.search_state import SearchState


def replace_experts(
    problem: PlacementProblem, placement: Placement, prices: Floats, seconds: float
) -> Placement:
    """Improve a placement by moves that are worth their price.

    Args:
        placement: [L][E] the placement in force; it need not fit the capacities, but no worker gets beyond them.
        prices: [L][E][N] seconds of a step that it costs to have an expert on a worker; 0 where it is.
        seconds: Time limit of the search, shared by the layers.

    Returns:
        The placement, the same one if nothing is worth its price.
    """
    deadline = time.perf_counter() + seconds
    state = SearchState(problem, to_owners(placement))
    state.counts = held(placement, problem.workers)
    rows = []
    for layer, row in enumerate(placement):
        now = time.perf_counter()
        until = now + (deadline - now) / (problem.layers - layer)  # an equal share of what is left
        if any(len(workers) > 1 for workers in row):
            rows.append(replace_replicas(problem, layer, row, prices[layer], state.counts, until))
            continue
        changed = True
        while changed and time.perf_counter() < until:
            least = state.scores[layer] * (1 - LEAST_GAIN)
            changed = state.change(layer, state.critical(layer), least, prices[layer])
        rows.append(tuple((int(worker),) for worker in state.owners[layer]))
    return tuple(rows)


def prices_of(
    placement: Placement, bandwidth: Floats, expert_bytes: float, slowness: float, steps: int
) -> Floats:
    """[L][E][N] seconds of each of the steps to come that it costs to send an expert to a worker, from the fastest one.

    Args:
        placement: [L][E] where experts are.
        bandwidth: [N][N] bytes per second from worker to worker; infinite to itself.
        expert_bytes: Bytes that are sent with an expert.
        slowness: How much longer transfers of experts take than the bandwidths say.
    """
    sent: list[list[Ints | Floats]] = [
        [expert_bytes / bandwidth[list(workers)].max(axis=0) for workers in row] for row in placement
    ]
    return np.asarray(sent, dtype=np.float64) * (slowness / max(steps, 1))
