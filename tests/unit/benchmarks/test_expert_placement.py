"""The benchmark of placed experts without its measurement."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_mux.moe.links import Traffic
from megatron_mux.moe.placement import from_owners
from megatron_mux.moe.placement_cost import make_problem
from tests.unit.moe.instances import make_profile, make_topology

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_without_namespaces_or_model_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import expert_placement

    assert expert_placement.main(["--upcycled", str(tmp_path), "--cases", "movie"]) == 2
    assert "examples/moe/upcycle.py" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip`
    assert expert_placement.main(["--cases", "zipf-0.8"]) == 2
    assert "network namespaces need root and iproute2" in capsys.readouterr().err


def test_routers_select_experts_as_zipfs_law_says() -> None:
    from expert_placement_models import EXPERTS, HIDDEN, TOP_K, _fit_router, entropy, zipf

    torch.manual_seed(0)
    x = torch.randn(1024, HIDDEN) + torch.randn(HIDDEN)
    for skew in (0.0, 1.2):
        weight, wanted = torch.empty(EXPERTS, HIDDEN), zipf(skew)
        assert float(wanted.sum()) == pytest.approx(TOP_K)
        _fit_router(weight, x, wanted)
        chosen = (x @ weight.T).topk(TOP_K, dim=1).indices
        found = torch.bincount(chosen.flatten(), minlength=EXPERTS).double() / len(x)
        assert (found - wanted).abs().max() < 0.03
        assert entropy(found) == pytest.approx(entropy(wanted), abs=0.01)


def test_bytes_on_a_ring() -> None:
    from expert_placement_bench import _ring_bytes

    # Of six processes on three nodes, three pass on to another node, each ten sixths of what is summed.
    assert _ring_bytes(600, "aabbcc") == pytest.approx(3 * 1000)
    assert _ring_bytes(600, "aaa") == 0


@pytest.mark.parametrize("nodes", [[1, 1], [1, 1, 1]])
def test_no_placement_sends_fewer_bytes_than_the_bound(nodes: list[int]) -> None:
    """With one distant worker the bound is reached."""
    from expert_placement_predicted import least_bytes

    for seed in range(3):
        profile, topology = make_profile(2, 3, seed=seed), make_topology(nodes, 6 - len(nodes))
        problem = make_problem(profile, topology, Traffic(100, 128.0, 8.0), "full")
        every = (np.reshape(owners, (2, 3)) for owners in product(range(len(nodes)), repeat=6))
        least = min(
            problem.cross_node_bytes(from_owners(owners))
            for owners in every
            if (np.bincount(owners.ravel(), minlength=len(nodes)) <= problem.capacities).all()
        )
        assert least_bytes(problem) <= least * (1 + 1e-9)
        if len(nodes) == 2:
            assert least_bytes(problem) == pytest.approx(least)


def test_measured_cases_are_predicted_without_measuring(tmp_path: Path) -> None:
    from expert_placement_predicted import predict_cases
    from expert_placement_results import Results
    from expert_placement_tables import markdown

    results = Results("a machine", ["movie"], None)
    links = {"bandwidth": [[1e6] * 7] * 7, "up": dict.fromkeys("abc", 1e6), "down": dict.fromkeys("abc", 1e6)}
    results.links(1, 16)["broker"] = links
    figures = dict.fromkeys(
        ["mean_bytes", "median_s", "predicted_bytes", "predicted_s", "interface_payload", "rest_s"], 1e5
    )
    figures |= {"gradient_bytes": 0.0, "compute_share": 0.1, "routed_equals_sent": True}
    results.add_case(
        {"case": "movie", "slack": 1.25, "between_mb_s": 1, "local_mb_s": 16, "tokens": 100, "rounds": 1}
        | {"steps": 1, "entropy": 0.5, "methods": {"ep": figures, "ours": figures}}
    )
    (tmp_path / "movie.profile.json").write_text(make_profile(2, 6).model_dump_json())
    predict_cases(results, [("movie", 1.25), ("movie", 1.0), ("austen", 1.0)], tmp_path)
    found = results.content["cases"][0]["predicted"]
    assert 0 < found["least"]["bytes"] <= min(found["concentrated"]["bytes"], found["ours"]["bytes"])
    assert found["ours"]["s"] <= min(found["concentrated"]["s"], found["paper-lp"]["s"])
    lines = markdown(results.content).splitlines()
    assert f"| broker, least possible | {found['least']['bytes'] / 1e5 - 1:+.1%} |" in lines


def test_cases_are_added_to_those_that_the_file_has(tmp_path: Path) -> None:
    from expert_placement_results import Results

    def case(name: str, slack: float, seconds: float) -> dict[str, Any]:
        return {"case": name, "slack": slack, "seconds": seconds}

    def opened() -> Results:
        return Results("a machine", ["movie", "zipf-0.8"], tmp_path / "result.json")

    first = opened()
    first.links(0.5, 8)["ep"] = {"up": 5e5}
    first.add_case(case("zipf-0.8", 1.0, 3.0))
    second = opened()
    assert second.links(0.5, 8) == {"ep": {"up": 5e5}} and second.links(1, 16) == {}
    assert (
        second.case("zipf-0.8", 1.0) == case("zipf-0.8", 1.0, 3.0) and second.case("zipf-0.8", 1.25) is None
    )
    second.add_case(case("movie", 1.25, 2.0))
    second.add_case(case("movie", 1.0, 2.0))
    second.add_case(case("zipf-0.8", 1.0, 4.0))
    found = [tuple(own.values()) for own in opened().content["cases"]]
    assert found == [("movie", 1.0, 2.0), ("movie", 1.25, 2.0), ("zipf-0.8", 1.0, 4.0)]


@pytest.mark.parametrize("reads_first", [False, True])
def test_a_process_that_ended_is_reported_with_what_it_printed(tmp_path: Path, reads_first: bool) -> None:
    from expert_placement_cluster import Member, ProcessEnded, Team

    class Killed:
        def wait(self) -> int:
            return -signal.SIGKILL

    (tmp_path / "errors").write_text("loading\nMemoryError\n")
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    os.close(answer_write)
    if not reads_first:
        os.close(command_read)
    with os.fdopen(answer_read) as answers:
        commands = os.fdopen(command_write, "w")
        team = Team("single", (Member(Killed(), commands, answers, tmp_path / "errors"),))
        with pytest.raises(ProcessEnded, match=r"(?s)process 0 of single.*SIGKILL.*'trace'.*MemoryError"):
            team.ask("trace")
        with contextlib.suppress(BrokenPipeError):
            commands.close()
    if reads_first:
        os.close(command_read)
