"""Links measured between processes: over limited links of network namespaces, and by the tool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_mux.moe.topology import read_topology
from tests import warm
from tests.end_to_end.ranks import run_tool

ROOT = Path(__file__).resolve().parents[2]
PAYLOAD = 1448 / 1514
"""What a full packet carries of what a limited link counts."""


@pytest.fixture(scope="module")
def server() -> Iterator[warm.Server]:
    with warm.Server() as running:
        yield running


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_bandwidths_and_shared_links_of_nodes(server: warm.Server) -> None:
    """Three processes on two nodes: pairs alone have a link's bandwidth; a node's processes share its uplink."""
    from expert_placement_cluster import started
    from namespaces import NamespacesRefused
    from node_namespaces import connected_nodes

    between, local = 2e6, 16e6
    try:
        with connected_nodes(["a", "a", "b"]) as network:
            network.limit(local, between)
            with started(server, network, range(3), 29500, "ep") as team:
                before = network.crossed()
                found = team.ask("links", seconds=0.1)[0]
                crossed = network.crossed().since(before)
    except NamespacesRefused as error:
        pytest.skip(f"no network namespaces: {error}")
    bandwidth = found["bandwidth"]
    for i, j, wanted in ((0, 1, local), (1, 0, local), (0, 2, between), (2, 1, between)):
        assert bandwidth[i][j] == pytest.approx(PAYLOAD * wanted, rel=0.2), (i, j)
    for node in ("a", "b"):
        assert found["up"][node] == pytest.approx(PAYLOAD * between, rel=0.2)
        assert found["down"][node] == pytest.approx(PAYLOAD * between, rel=0.2)
    assert 0.9 < crossed.payload / sum(crossed.bytes.values()) < 1


def measure(server: warm.Server, words: Sequence[object]) -> tuple[list[int], str]:
    """Run the tool in two processes: see `run_tool`."""
    return run_tool(server, "measure_topology", words, ranks=2)


def test_the_tool_writes_a_topology(server: warm.Server, tmp_path: Path) -> None:
    file = tmp_path / "topology.json"
    words = ["--nodes", "a,b", "--capacity", "9", "--milliseconds", "5", "--output", file]
    assert measure(server, words)[0] == [0, 0]
    topology = read_topology(file)
    assert topology.node_names == ("a", "b") and topology.capacities.tolist() == [9, 9]
    assert set(topology.uplinks) == {"a", "b"} and topology.bandwidth[0, 1] > 1e6
    assert json.loads(file.read_text())["latency_s"][0][0] == 0
    assert measure(server, [*words, "--master"])[0] == [0, 0]
    with_master = read_topology(file)
    assert with_master.master_node == "a" and len(with_master.workers) == 1
    assert with_master.from_master()[0] > 1e6


def test_a_wrong_command_line_is_refused_once(server: warm.Server, tmp_path: Path) -> None:
    for words, said in (
        (["--capacity", "1", "--nodes", "a"], "--nodes a: must name 2 nodes"),
        (["--capacity", "1,2,3"], "--capacity: has 3 numbers, but there are 2 workers"),
        (["--capacity", "1", "--output", tmp_path / "no/t.json"], "there is no directory"),
    ):
        statuses, errors = measure(server, words)
        assert statuses == [2, 2] and errors.count(said) == 1, errors
