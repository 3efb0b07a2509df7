"""A plan that is not for this run, or was edited by hand, is refused with the offending entry marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.errors import UserError
from megatron_mux.fusion.check import ALSO_PRINTED, check_plan, read_plan
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import dumps
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from tests.unit.fusion import backbone

MESH = Mesh(1, 2, 1)
LOADS = {name: backbone.load(name, [16 * (i + 1)] * 4) for i, name in enumerate("abcd")}

Edit = Callable[[dict[str, Any]], None]


def planned() -> dict[str, Any]:
    planner = Planner(PlanningContext(backbone.profile(), backbone.info(), MESH, micro_batches=2, chunk=32))
    found: dict[str, Any] = json.loads(dumps(planner.fixed("temporal", LOADS)))
    assert len(found["buckets"]) == 4 and any(max(b["chunks"]) > 1 for b in found["buckets"])
    return found


def refused(value: dict[str, Any], directory: Path, mesh: Mesh = MESH, tasks: str = "abcd") -> list[str]:
    (directory / "plan.json").write_text(json.dumps(value))
    with pytest.raises(UserError) as told:
        check_plan(read_plan(directory / "plan.json"), backbone.info().fingerprint, mesh, list(tasks))
    return told.value.problems


def test_a_plan_as_the_tool_prints_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**planned(), **dict.fromkeys(ALSO_PRINTED)}))
    plan = read_plan(tmp_path / "plan.json")
    check_plan(plan, backbone.info().fingerprint, MESH, list("abcd"))


def test_another_backbone(tmp_path: Path) -> None:
    (problem,) = refused({**planned(), "backbone": "b" * 64}, tmp_path)
    assert problem == "backbone: the plan is for another backbone (bbbbbbbbbbbb, not aaaaaaaaaaaa): plan anew"


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (Mesh(2, 2, 1), "tensor: the plan is for 1, this run has 2"),
        (Mesh(1, 4, 1), "stages: the plan is for 2, this run has 4"),
        (Mesh(1, 2, 3), "data: the plan is for 1, this run has 3"),
    ],
)
def test_another_number_of_ranks(mesh: Mesh, said: str, tmp_path: Path) -> None:
    (problem,) = refused(planned(), tmp_path, mesh)
    assert problem.startswith(said)


def test_another_task_set(tmp_path: Path) -> None:
    unknown, missing = refused(planned(), tmp_path, tasks="abce")
    assert "there is no task 'd' in this run" in unknown and unknown.startswith("buckets[")
    assert missing == "buckets: 'e' of this run is in none"


def _drop(value: dict[str, Any]) -> None:
    hybrid = next(h for b in value["buckets"] for h in b["hybrid_tasks"] if "b" in h["tasks"])
    if len(hybrid["tasks"]) == 1:
        value["buckets"] = [b for b in value["buckets"] if hybrid not in b["hybrid_tasks"]]
    else:
        hybrid["tasks"].remove("b")


def _twice(value: dict[str, Any]) -> None:
    value["buckets"][-1]["hybrid_tasks"][0]["tasks"].append(
        value["buckets"][0]["hybrid_tasks"][0]["tasks"][0]
    )


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_drop, "buckets: 'b' of this run is in none"),
        (_twice, "is at buckets[0].hybrid_tasks[0].tasks[0] already"),
        (
            lambda value: value["buckets"][0].update(forward=[1.0]),
            "buckets[0].forward: has 1 entries, 2 are needed",
        ),
        (lambda value: value["buckets"][0].update(forward=[]), "buckets[0]: has no predicted seconds"),
        (lambda value: value["buckets"][0].update(chunk=None), "its packs are not cut, yet"),
        (lambda value: value["buckets"][0].update(micro_batches=1), "the bucket has 1"),
        (lambda value: value["buckets"][0].update(chunks=[10**9]), "buckets[0].chunks[0]"),
        (lambda value: value["buckets"][0].update(micro_batches=10**8), "buckets[0].micro_batches"),
        (
            lambda value: value.update(activation_limit=[1.0]),
            "activation_limit: has 1 entries for 2 rank(s)",
        ),
    ],
)
def test_a_plan_edited_by_hand(edit: Edit, said: str, tmp_path: Path) -> None:
    value = planned()
    edit(value)
    problems = refused(value, tmp_path)
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(("text", "said"), [("{", "is no JSON"), ("[]", "must be one JSON object")])
def test_what_is_no_plan_file(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=said):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.json")
