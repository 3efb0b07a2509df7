"""`tools/place_experts.py`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_mux.moe.access_profile import read_profile
from megatron_mux.moe.placement import read_placement
from tests.unit.moe.instances import profile_content, topology_content, zipf_access
from tools.place_experts import main


class Workplace:
    """A folder with a profile and a topology."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profile, self.topology = folder / "profile.json", folder / "topology.json"
        self.write_profile(profile_content(zipf_access(4, 6, 2, 0.8, 0), 2))
        self.write_topology(topology_content([2, 1], 8))

    def write_profile(self, content: Any) -> None:
        self.profile.write_text(json.dumps(content))

    def write_topology(self, content: Any) -> None:
        self.topology.write_text(json.dumps(content))

    def run(self, *words: str) -> int:
        return main(["--profile", str(self.profile), "--topology", str(self.topology), *words])


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.mark.parametrize("objective", ["vela", "full"])
def test_a_placement_is_written_and_printed(
    workplace: Workplace, objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = workplace.folder / "placement.json"
    assert workplace.run("--objective", objective, "--output", str(output), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(output.read_text())
    assert found["lower_bound_s"] <= found["objective_s"] <= min(found["baselines"].values())
    assert found["gap"] == pytest.approx(found["objective_s"] / found["lower_bound_s"] - 1)
    assert set(found["baselines"]) == {"contiguous", "sequential", "random", "eplb", "paper-lp"}
    model = read_profile(workplace.profile).model
    placement = read_placement(output, model, 3, np.full(3, 8), replicas=False).placement
    assert [list(map(list, row)) for row in placement] == found["placement"]


def test_the_table_names_all_placements(workplace: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    assert workplace.run("--solver", "sequential", "--slots", "9") == 0
    printed = capsys.readouterr().out
    for word in ("27 slots", "sequential", "contiguous", "random", "eplb", "paper-lp", "lower bound", "gap"):
        assert word in printed


def test_time_is_in_proportion_to_tokens_and_bytes(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for words in (("--tokens", "1000"), ("--tokens", "2000"), ("--tokens", "1000", "--bytes-per-value", "4")):
        assert workplace.run("--json", *words) == 0
        found.append(json.loads(capsys.readouterr().out)["objective_s"])
    assert found[1] == pytest.approx(2 * found[0]) == found[2]


def refusal(workplace: Workplace, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    output = workplace.folder / "placement.json"
    before = set(workplace.folder.iterdir())
    assert workplace.run("--output", str(output), *words) == 2
    assert set(workplace.folder.iterdir()) == before
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err.removeprefix("place_experts.py: ").strip()


def test_a_topology_that_does_not_fit_is_refused(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "workers: have a capacity of 21 experts together, but the model has 4 layers x 6 experts = 24"
    assert refusal(workplace, capsys, "--slots", "7").startswith(f"{workplace.topology}, --slots 7: {said}")
    workplace.write_topology(topology_content([2, 1], 7))
    assert refusal(workplace, capsys).startswith(f"{workplace.topology}: {said}")
    workplace.write_topology(topology_content([2, 1], 8, master_node=None))
    assert refusal(workplace, capsys).startswith(f"{workplace.topology}: master_node: is missing")
    assert "paper-lp needs a master" in refusal(
        workplace, capsys, "--objective", "full", "--solver", "paper-lp"
    )


def test_flags_that_contradict_the_input_are_refused(
    workplace: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(workplace, capsys, "--hidden-size", "32").startswith("--hidden-size 32: model.hidden_size")
    assert "--output" in refusal(workplace, capsys, "--output", str(workplace.profile))
    assert "--solver" in refusal(workplace, capsys, "--solver", "best")
    assert "--slots" in refusal(workplace, capsys, "--slots", "0")
    content = profile_content(zipf_access(4, 6, 2, 0.8, 0), 2)
    content["model"]["hidden_size"] = None
    workplace.write_profile(content)
    assert refusal(workplace, capsys).startswith("--hidden-size: is needed")
    assert workplace.run("--hidden-size", "32", "--json") == 0
