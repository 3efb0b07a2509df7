"""`tools/plan.py` and `--mux-plan` on backbones with experts: how experts are divided is planned, kept and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_mux.fusion.plan import Plan
from tests.end_to_end.forked import Server
from tests.end_to_end.ranks import run_ranks
from tests.end_to_end.test_plans import Call, caller
from tests.end_to_end.workplace import TASKS, Workplace, furnish

pytestmark = pytest.mark.usefixtures("warm_workers")

STEPS = 2
SHORT = {
    name: {**TASKS[name], "training": {**TASKS[name]["training"], "max_steps": STEPS}}
    for name in ("lora", "diff")
}


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v3"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    made = furnish(tmp_path_factory.mktemp("planned"), request.param)
    if request.param == "deepseek_v3":  # its attention has other projections
        lora = {**SHORT["lora"]["adapter"], "target_modules": ["q_b_proj", "kv_b_proj"]}
        made.write_tasks("tasks.yaml", {**SHORT, "lora": {**SHORT["lora"], "adapter": lora}})
    else:
        made.write_tasks("tasks.yaml", SHORT)
    return made


@pytest.fixture
def plan(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Call:
    monkeypatch.setenv("MEGATRON_MUX_CACHE", str(tmp_path / "cache"))
    return caller(place, capsys, threads=1)


def test_experts_are_divided_too(plan: Call) -> None:
    status, output, errors = plan("--gpus", "4", "--device", "H100", "--bf16", "--json")
    assert status == 0, errors
    found = json.loads(output)["mesh"]
    meshes = {(m["tensor"], m["pipeline"], m["data"], m["expert"]) for m in found}
    assert {(1, 1, 4, 1), (1, 1, 4, 2), (1, 1, 4, 4), (1, 2, 2, 2), (2, 1, 2, 2)} <= meshes
    status, output, _ = plan("--gpus", "4", "--device", "H100", "--bf16")
    assert status == 0 and "--expert-model-parallel-size" in output and "experts" in output


def test_weights_are_not_shared_out_among_unlike_experts(plan: Call) -> None:
    """As a run refuses it; other ways to divide the ranks are planned all the same."""
    usual = ("--gpus", "2", "--device", "H100", "--bf16", "--backbone-weights", "sharded")
    status, output, errors = plan(*usual, "--json")
    assert status == 0, errors
    assert {(m["data"], m["expert"]) for m in json.loads(output)["mesh"]} >= {(1, 1), (2, 1)}
    assert all(m["expert"] == 1 or m["data"] == 1 for m in json.loads(output)["mesh"])


def test_a_plan_for_expert_ranks_is_followed_by_them_alone(
    plan: Call, place: Workplace, server: Server, tmp_path: Path
) -> None:
    file, save = tmp_path / "plan.json", tmp_path / "run"
    status, output, _ = plan("--data-parallel", "2", "--expert-parallel", "2", "--output", file)
    assert status == 0 and "--expert-model-parallel-size 2" in output
    made = Plan.from_json(json.loads(file.read_text()))
    assert made.mesh.exchanges and made.mesh.over_data and made.mesh.ranks == 2
    arguments = place.arguments("--mux-plan", file, "--save", save)
    runs = run_ranks(server, [*arguments, "--expert-model-parallel-size", "2"], 2)
    assert [run.status for run in runs] == [0, 0], runs[0].errors
    assert f"following {file}" in runs[0].output
    runs = run_ranks(server, place.arguments("--mux-plan", file, "--save", tmp_path / "other"), 2)
    assert {run.status for run in runs} == {2}
    assert "expert: the plan is for 2, this run has 1" in runs[0].errors + runs[1].errors


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--expert-parallel", "9", "--data-parallel", "9"], "experts cannot fill 9 expert ranks"),
        (["--expert-parallel", "2"], "does not divide the 1 processes"),
        (["--tensor-parallel", "2"], "needs --sequence-parallel"),
        (
            ["--expert-managers", "2", "--data-parallel", "2"],
            "their master is one rank: leave out --data-parallel",
        ),
        (["--expert-managers", "2", "--memory-limit", "1GiB"], "--memory-limit: memory is not predicted"),
        (
            ["--data-parallel", "2", "--expert-parallel", "2", "--backbone-weights", "sharded"],
            "--backbone-weights sharded: divides weights over pipelines",
        ),
        (["--tensor-parallel", "2", "--subgraphs"], "--subgraphs does not know"),
    ],
)
def test_divisions_that_cannot_be(plan: Call, more: list[str], said: str) -> None:
    status, output, errors = plan(*more)
    assert status == 2 and not output and said in errors, errors
