"""Placements that are improved by moves worth their price."""

from __future__ import annotations

from itertools import count, product

import numpy as np
import pytest

from megatron_mux.moe.links import Traffic
from megatron_mux.moe.placement import check_placement, from_owners, held
from megatron_mux.moe.placement_cost import PlacementProblem, make_problem
from megatron_mux.moe.solvers.replace import prices_of, replace_experts
from megatron_mux.moe.solvers.solve import solve
from tests.unit.moe.instances import make_profile, make_topology

TRAFFIC = Traffic(1000, 128.0)
TOPOLOGY = make_topology([2, 2], 12)


def problem_of(seed: int) -> PlacementProblem:
    return make_problem(make_profile(4, 8, seed=seed), TOPOLOGY, TRAFFIC, "full")


def moves(before: object, after: object) -> int:
    return int((np.array(before) != np.array(after)).sum())


def test_a_price_is_paid_by_the_gain() -> None:
    """Cheap moves bring most of what solving anew would; the dearer they are, the fewer there are."""
    old = solve(make_profile(4, 8, seed=0), TOPOLOGY, TRAFFIC, "full").solution.placement
    problem = problem_of(1)  # the skew has changed
    best = solve(make_profile(4, 8, seed=1), TOPOLOGY, TRAFFIC, "full").solution.objective
    before = problem.placement_cost(old)
    counts = []
    for slowness in (1e-6, 3.0, 30.0, 1e6):
        prices = prices_of(old, TOPOLOGY.between_workers(), 1e5, slowness, 100)
        new = replace_experts(problem, old, prices, 5.0)
        counts.append(moves(old, new))
        paid = sum(
            prices[layer, expert, worker]
            for layer, row in enumerate(new)
            for expert, (worker,) in enumerate(row)
        )
        assert problem.placement_cost(new) + paid <= before * (1 + 1e-6)
        assert (held(new, 4) <= problem.capacities).all()
        if slowness == 1e-6:
            assert before - problem.placement_cost(new) > 0.8 * (before - best)
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


def test_prices_are_those_of_the_fastest_source() -> None:
    bandwidth = np.array([[np.inf, 10.0, 1.0], [10.0, np.inf, 5.0], [1.0, 5.0, np.inf]])
    prices = prices_of((((0,), (0, 1)),), bandwidth, 100.0, 2.0, 4)
    assert prices.tolist() == [[[0.0, 5.0, 50.0], [0.0, 0.0, 10.0]]]


def test_replicas_follow_the_skew() -> None:
    """Cheap changes bring most of what solving anew would; none is made that costs more than it gains."""
    topology = make_topology([2, 2], 12, master_node=None)
    old = solve(make_profile(4, 8, seed=0), topology, TRAFFIC, "full").solution.placement
    assert all(max(map(len, row)) > 1 for row in old), "every layer has replicas"
    problem = make_problem(make_profile(4, 8, seed=1), topology, TRAFFIC, "full")
    best = solve(make_profile(4, 8, seed=1), topology, TRAFFIC, "full").solution.objective
    before = problem.placement_cost(old)
    for slowness in (1e-6, 1e6):
        prices = prices_of(old, topology.between_workers(), 1e5, slowness, 100)
        new = replace_experts(problem, old, prices, 20.0)
        check_placement(new, 4, 8, 4, problem.capacities)
        if slowness == 1e6:
            assert new == old
        else:
            assert before - problem.placement_cost(new) > 0.5 * (before - best) > 0


def test_a_search_that_is_late_improves_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    problem = make_problem(make_profile(4, 8), make_topology([2, 2], 32), TRAFFIC, "full")
    old = from_owners(np.tile(np.arange(8) % 4, (4, 1)))
    new = replace_experts(problem, old, np.zeros((4, 8, 4)), 19)
    assert all(moves(*rows) for rows in zip(old, new, strict=True))


def test_layers_with_and_without_replicas_get_better() -> None:
    topology = make_topology([2, 2], 4, master_node=None)
    problem = make_problem(make_profile(2, 4, seed=2), topology, TRAFFIC, "full")
    changed = 0
    for owners in [*product(range(4), repeat=4)][::8]:
        old = (((0, 1), (0,), (0,), (0,)), tuple((worker,) for worker in owners))
        new = replace_experts(problem, old, np.zeros((2, 4, 4)), 5.0)
        check_placement(new, 2, 4, 4)
        assert (held(new, 4) <= np.maximum(problem.capacities, held(old, 4))).all()
        assert problem.placement_cost(new) <= problem.placement_cost(old) * (1 + 1e-9)
        changed += new[0] != old[0] and new[1] != old[1]
    assert changed > 5
