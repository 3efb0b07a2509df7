"""Topologies: bandwidths and capacities that a file gives, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.errors import UserError
from megatron_mux.moe.topology import Topology, read_topology
from tests.unit.moe.instances import make_topology, topology_content


def refusal(tmp_path: Path, **more: Any) -> str:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps({**topology_content([2, 1], 8), **more}))
    with pytest.raises(UserError) as caught:
        read_topology(path)
    return str(caught.value).removeprefix(f"{path}: ")


def test_two_kinds_of_links() -> None:
    topology = make_topology([2, 1], 8)
    assert topology.from_master().tolist() == [16e9, 16e9, 1e9]
    inf = np.inf
    assert topology.between_workers().tolist() == [[inf, 16e9, 1e9], [16e9, inf, 1e9], [1e9, 1e9, inf]]
    assert topology.node_names == ("a", "b")


def test_a_matrix_gives_the_masters_links_through_workers_on_its_node() -> None:
    matrix = [[0, 9.0, 2.0], [8.0, 0, 3.0], [4.0, 5.0, 0]]
    topology = make_topology([2, 1], 8, bandwidth=matrix)
    assert topology.from_master().tolist() == [8.0, 9.0, 2.0]
    alone = make_topology([1, 2], 8, bandwidth=[[7.0, 1, 1], [1, 0, 1], [1, 1, 0]])
    assert alone.from_master().tolist() == [7.0, 1.0, 1.0]
    given = make_topology([2, 1], 8, bandwidth=matrix, master_bandwidth=[1.0, 2.0, 3.0])
    assert given.from_master().tolist() == [1.0, 2.0, 3.0]
    again = Topology.model_validate(json.loads(given.model_dump_json()))
    assert np.array_equal(again.bandwidth, given.bandwidth)


def test_capacities_in_bytes_hold_whole_experts() -> None:
    topology = make_topology([2, 1], 1000, capacity_unit="bytes", expert_bytes=300)
    assert topology.capacities.tolist() == [3, 3, 3]
    assert topology.with_slots(7).capacities.tolist() == [7, 7, 7]
    with pytest.raises(
        UserError, match="capacity of 9 experts together, but the model has 2 layers x 5 experts = 10"
    ):
        topology.check_capacity(2, 5)
    topology.check_capacity(3, 3)


def test_without_a_master_the_papers_objective_is_refused() -> None:
    with pytest.raises(UserError, match="master_node: is missing"):
        make_topology([1, 1], 4, master_node=None).from_master()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"workers": []}, "workers: "),
        ({"workers": [{"node": "a", "capacity": -1}]}, "workers[0].capacity: "),
        ({"workers": [{"node": "a"}]}, "workers[0].capacity: is missing"),
        ({"workers": [{"node": "a", "capacity": 1, "gpu": 0}]}, "workers[0].gpu: is not known"),
        ({"bandwidth": [[0, 1.0], [1.0, 0]]}, "bandwidth: is 2 x 2, but must be 3 x 3"),
        ({"bandwidth": [[0, 1.0, 1], [1.0, 0, 1], [1, 0, 0]]}, "bandwidth[2][1]: must be greater than 0"),
        (
            {"bandwidth": [[0, 1.0, 1], [1.0, 0, -1], [1, 1, 0]]},
            "bandwidth[1][2]: must be a number of at least 0",
        ),
        ({"bandwidth": {"within_node": 1.0}}, "bandwidth.between_nodes: is missing"),
        ({"bandwidth": {"within_node": 1.0, "between_nodes": 0.0}}, "bandwidth.between_nodes: "),
        (
            {"uplinks": {"c": {"up": 1.0, "down": 1.0}}},
            "uplinks.c: no worker is on this node: nodes are a, b",
        ),
        ({"uplinks": {"a": {"up": 1.0}}}, "uplinks.a.down: is missing"),
        ({"uplinks": {"a": {"up": 0, "down": 1.0}}}, "uplinks.a.up: "),
        ({"master_bandwidth": [1.0, 2.0]}, "master_bandwidth: has 2 entries, but there are 3 workers"),
        ({"master_bandwidth": [1.0, 2.0, 0]}, "master_bandwidth[2]: must be greater than 0"),
        ({"master_node": None, "master_bandwidth": [1.0, 2.0, 3.0]}, "master_node: is missing"),
        ({"master_node": "z", "bandwidth": [[1.0] * 3] * 3}, "master_node: no worker is on node 'z'"),
        (
            {"master_node": "b", "bandwidth": [[0, 1, 1], [1, 0, 1], [1, 1, 0]]},
            "bandwidth[2][2]: must be the bandwidth",
        ),
        ({"capacity_unit": "bytes"}, "expert_bytes: is missing"),
        ({"capacity_unit": "slots"}, "capacity_unit: "),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    assert refusal(tmp_path, **more).startswith(said)
