"""Which layers each stage gets: by flags, by the plan that is known, by cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.arguments import parse_args
from megatron_mux.errors import UserError
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan, plan_for
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.training.layer_split import split_layers
from tests.unit.fusion import backbone

LAYERS = 4


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The split that flags lead to, on so many ranks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks.yaml").write_text("")

    def found(flags: str = "", ranks: int = 2, known: Plan | None = None, loads: int = 3) -> tuple[int, ...]:
        words = f"--backbone model --mux-tasks tasks.yaml --pipeline-model-parallel-size {ranks} {flags}"
        tasks = backbone.random_loads(1, loads, LAYERS) if loads else {}
        context = PlanningContext(
            backbone.profile(LAYERS), backbone.info(LAYERS), Mesh(pipeline=ranks), tasks=tasks
        )
        return split_layers(context, parse_args(words.split()), known, lambda what: what).mesh.split

    return found


def test_flags_say_it(split: Any) -> None:
    assert split("--pipeline-model-parallel-layout Et*3|tL") == (3, 1)
    assert split("--pipeline-model-parallel-layout E(t|)*3tL") == (1, 1, 1, 1)
    assert split("--decoder-last-pipeline-num-layers 1") == (3, 1)
    assert split("--mux-layer-split even") == (2, 2)
    assert split("--mux-layer-split even --num-virtual-stages-per-pipeline-rank 2") == (1, 1, 1, 1)
    assert split("--num-layers-per-virtual-pipeline-stage 1") == (1, 1, 1, 1)


def test_without_flags_costs_say_it_unless_a_plan_is_known(split: Any) -> None:
    by_cost = split()
    assert sum(by_cost) == LAYERS and len(by_cost) == 2
    plan = replace(plan_for("spatial", {"a": 1}, 2), split=(1, 3))
    assert split(known=plan) == (1, 3)
    assert split(known=replace(plan, split=())) == (2, 2), "a plan without a split is of an even one"
    assert split("--mux-layer-split even", known=plan) == (2, 2), "a flag is stronger"
    assert split(known=plan_for("spatial", {"a": 1}, 4)) == by_cost, "it is for other ranks"
    assert split("--num-virtual-stages-per-pipeline-rank 2", known=plan) == (1, 1, 1, 1)
    assert split(known=replace(plan, split=(3, 3))) == by_cost, "it is for another backbone"
    assert split(loads=0) == (2, 2), "no task is known yet"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--pipeline-model-parallel-layout Et|tL", "has 2 layers, the backbone 4"),
        ("--pipeline-model-parallel-layout Et|t|ttL", "3 stages, which 2 ranks cannot share"),
        ("--num-layers-per-virtual-pipeline-stage 3", "cannot share the backbone's 4 layers like that"),
        ("--num-virtual-stages-per-pipeline-rank 3", "4 layers cannot fill 6 stages"),
        ("--decoder-first-pipeline-num-layers 4", "leave 0 of 4 layers for 1 stages"),
        (
            "--pipeline-model-parallel-layout Et|t|t|tL --mux-schedule gpipe",
            "runs one stage per rank, not 2",
        ),
        ("--mux-schedule interleaved", "needs several stages per rank"),
    ],
)
def test_what_does_not_come_out_is_refused(split: Any, flags: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        split(flags)
