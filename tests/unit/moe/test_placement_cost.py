"""The objectives, against sums written out token by token."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from megatron_mux.expert_shape import serving_rank
from megatron_mux.moe.access_profile import AccessProfile
from megatron_mux.moe.links import Traffic, answers_on_top
from megatron_mux.moe.placement import Placement, from_owners
from megatron_mux.moe.placement_cost import PlacementProblem, make_problem
from megatron_mux.moe.routed_sets import sets_of
from megatron_mux.moe.solvers.search_state import SearchState
from megatron_mux.moe.topology import Topology
from tests.unit.moe.instances import make_profile, make_topology, profile_content, topology_content

TRAFFIC = Traffic(100, 64.0)


def random_owners(problem: PlacementProblem, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, problem.workers, problem.access.shape)


def counted_profile(layers: int, experts: int, top_k: int, seed: int) -> AccessProfile:
    """A profile whose sets are counted."""
    rng = np.random.default_rng(seed)
    access, sets = np.zeros((layers, experts)), []
    for layer in range(layers):
        tokens = [rng.choice(experts, top_k, replace=False, p=np.arange(1, experts + 1) / sum(range(experts + 1)))
                  for _ in range(30)]  # fmt: skip
        for members in tokens:
            access[layer, members] += 1 / len(tokens)
        sets.append([{"experts": members.tolist(), "count": 1} for members in tokens])
    return AccessProfile.model_validate(profile_content(access, top_k, routed_sets=sets))


def with_compute(nodes: list[int], **more: Any) -> Topology:
    content = topology_content(nodes, 100, **more)
    for i, worker in enumerate(content["workers"]):
        worker["seconds_per_row"] = 1e-9 * (i + 1)
    return Topology.model_validate(content)


def test_the_papers_objective() -> None:
    profile, topology = make_profile(3, 5), make_topology([1, 2], 9)
    problem = make_problem(profile, topology, TRAFFIC, "vela")
    owners = random_owners(problem, 0)
    expected = 0.0
    for layer in range(3):
        times = []
        for worker, bandwidth in enumerate((16e9, 1e9, 1e9)):
            tokens = 100 * sum(profile.access[layer, e] for e in range(5) if owners[layer, e] == worker)
            times.append(2 * 64.0 * tokens / bandwidth)  # 2 D / B
        expected += max(times)
    assert problem.cost(owners) == pytest.approx(expected, rel=1e-12)
    assert not problem.allows_replicas
    with pytest.raises(ValueError, match="no replicas"):
        problem.placement_cost((((0, 1), (0,), (0,), (0,), (0,)),) * 3)


def written_out(problem: PlacementProblem, topology: Topology, placement: Placement) -> tuple[float, float]:
    """Seconds of a step and bytes between nodes, by adding up every token of every sender."""
    names = [worker.node for worker in topology.workers]
    master = topology.master_node
    senders = [(None, master)] if master else list(enumerate(names))
    tokens = 100 / len(senders)
    between, from_master = topology.between_workers(), None if master is None else topology.from_master()
    seconds = crossing = 0.0
    for layer, row in enumerate(placement):
        pair = np.zeros((len(senders), len(names)))
        rows = np.zeros(len(names))
        assert problem.sets is not None
        sets = problem.sets[layer]
        for s, (sender, node) in enumerate(senders):
            for members, weight in zip(sets.members, sets.weights, strict=True):
                serving = [serving_rank(row[e], sender, node, names) for e in members]
                for worker in set(serving):
                    pair[s, worker] += tokens * weight * 64.0
            for e, workers in enumerate(row):
                rows[serving_rank(workers, sender, node, names)] += tokens * problem.access[layer, e]
        out, back = [0.0], [0.0]
        for s, n in product(range(len(senders)), range(len(names))):
            if senders[s][0] != n:
                there = between[s, n] if from_master is None else from_master[n]
                here = between[n, s] if from_master is None else from_master[n]
                out.append(float(pair[s, n] / there))
                back.append(float(pair[s, n] / here))
        every = list(np.ndindex(*pair.shape))
        for node, link in topology.uplinks.items():
            left = sum(float(pair[s, n]) for s, n in every if senders[s][1] == node != names[n])
            entered = sum(float(pair[s, n]) for s, n in every if senders[s][1] != node == names[n])
            out += [left / link.up, entered / link.down]
            # A master's workers answer while others' rows are on their way.
            (back if master is None else out).extend([entered / link.up, left / link.down])
        if master is not None and master in topology.uplinks:
            link = topology.uplinks[master]
            away = sorted((float(pair[0, n]) for n, name in enumerate(names) if name != master), reverse=True)
            even = max(m * size for m, size in enumerate(away, start=1))
            back.append((away[0] + even) / 2 / min(link.up, link.down))
        compute = max(rows[n] * topology.workers[n].seconds_per_row for n in range(len(names)))
        seconds += 2 * max(out) + 2 * max(back) + compute
        crossing += 4 * sum(float(pair[s, n]) for s, n in every if senders[s][1] != names[n]) / 100
    return seconds, crossing


@pytest.mark.parametrize("master", ["a", "b", None])
@pytest.mark.parametrize("replicas", [False, True])
def test_the_full_objective_adds_up_every_token(master: str | None, replicas: bool) -> None:
    uplinks = {"a": {"up": 5e8, "down": 2e9}, "b": {"up": 1e9, "down": 7e8}}
    rng = np.random.default_rng(3)
    matrix = rng.uniform(1e8, 9e8, (4, 4)).tolist()
    for bandwidth in ({"within_node": 8e9, "between_nodes": 1e9}, matrix):
        topology = with_compute([2, 2], master_node=master, uplinks=uplinks, bandwidth=bandwidth)
        problem = make_problem(counted_profile(2, 6, 3, 1), topology, TRAFFIC, "full")
        placement = from_owners(random_owners(problem, 2))
        if replicas:
            placement = tuple((tuple(sorted({*row[0], 1, 3})), *row[1:-1], (0, 1)) for row in placement)
        seconds, crossing = written_out(problem, topology, placement)
        assert problem.placement_cost(placement) == pytest.approx(seconds, rel=1e-9)
        assert problem.cross_node_bytes(placement) == pytest.approx(crossing, rel=1e-9)


@pytest.mark.parametrize(("objective", "master"), [("vela", "a"), ("full", "a"), ("full", None)])
def test_changes_are_priced_as_the_placement_that_they_lead_to(objective: str, master: str | None) -> None:
    topology = with_compute([2, 2], master_node=master)
    problem = make_problem(counted_profile(2, 8, 3, 4), topology, TRAFFIC, objective)
    owners = random_owners(problem, 5)
    state = SearchState(problem, owners)
    every = np.arange(8)
    moves, swaps = state.move_scores(1, every), state.swap_scores(1, every)
    for e, n in product(range(8), range(4)):
        other = owners.copy()
        other[1, e] = n
        assert SearchState(problem, other).scores[1] == pytest.approx(moves[e, n], rel=1e-12)
    for e, f in product(range(8), range(8)):
        other = owners.copy()
        other[1, [e, f]] = owners[1, [f, e]]
        expected = np.inf if owners[1, e] == owners[1, f] else SearchState(problem, other).scores[1]
        assert swaps[e, f] == pytest.approx(expected, rel=1e-12)
    state.move(1, 3, (int(owners[1, 3]) + 1) % 4)
    assert state.cost == pytest.approx(problem.cost(state.owners), rel=1e-12)


def test_pairs_of_a_top_two_model_are_its_sets() -> None:
    pairs = np.zeros((1, 3, 3))
    for a, b, count in ((0, 1, 5), (1, 2, 3), (0, 2, 2)):
        pairs[0, a, b] = pairs[0, b, a] = count
    access = np.array([[0.7, 0.8, 0.5]])
    profile = AccessProfile.model_validate(profile_content(access, 2, coactivation=pairs.tolist()))
    (sets,) = sets_of(profile)
    assert sorted(zip(sets.members.tolist(), sets.weights.tolist(), strict=True)) == [
        ([0, 1], 0.5),
        ([0, 2], 0.2),
        ([1, 2], 0.3),
    ]
    assert sets.visits(np.array([0, 0, 1]), 2).tolist() == pytest.approx([1.0, 0.5])
    assert sets.visits(np.array([1, 1, 1]), 2).tolist() == [0.0, 1.0], "sent once"


@pytest.mark.parametrize("pairs", [False, True])
def test_drawn_sets_have_the_access_probabilities(pairs: bool) -> None:
    profile = make_profile(2, 12, top_k=4, skew=0.3)
    more: dict[str, Any] = {}
    if pairs:  # experts 0 and 1 are always selected together
        together = np.full((2, 12, 12), 10.0)
        together[:, [0, 1], [1, 0]] = 4000.0
        more["coactivation"] = together.tolist()
    profile = AccessProfile.model_validate(profile_content(profile.access, 4, **more))
    for layer, sets in enumerate(sets_of(profile)):
        assert all(len(set(members)) == 4 for members in sets.members.tolist())
        assert sets.weights.sum() == pytest.approx(1)
        assert sets.marginals(12) == pytest.approx(profile.access[layer], abs=1e-3)
        both = sets.weights[(sets.members == 0).any(axis=1) & (sets.members == 1).any(axis=1)].sum()
        single = min(profile.access[layer, :2])
        assert bool(both > 0.6 * single) is pairs


def shared_evenly(sizes: list[float]) -> float:
    """When all answers are back if messages on a link share it evenly, and answers go over another one."""
    forth, now = dict(enumerate(sizes)), 0.0
    back: dict[int, float] = {}
    while forth or back:
        step = min(len(link) * min(link.values()) for link in (forth, back) if link)
        now += step
        arrived = []
        for link in (forth, back):
            for message in [*link]:
                link[message] -= step / len(link)
            arrived.append([message for message in link if link[message] < 1e-12])
        back = {message: left for message, left in back.items() if message not in arrived[1]}
        back |= {message: sizes[message] for message in arrived[0]}
        forth = {message: left for message, left in forth.items() if message not in arrived[0]}
    return now


@pytest.mark.parametrize("sizes", [[1.0], [1.0, 1.0, 1.0], [1.0, 2.0, 4.0, 9.0], [5.0, 0.5, 4.0, 4.5, 0.1]])
def test_answers_on_top_are_between_messages_in_turn_and_evenly_shared_links(sizes: list[float]) -> None:
    in_turn, evenly = sum(sizes) + max(sizes), shared_evenly(sizes)
    assert sum(sizes) + float(answers_on_top(np.array(sizes))) == pytest.approx((in_turn + evenly) / 2)
