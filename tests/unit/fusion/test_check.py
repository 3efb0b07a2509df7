"""A plan that is not for this run, or was edited by hand, is refused with the offending entry marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_mux.errors import UserError
from megatron_mux.fusion.check import check_plan, read_plan
from megatron_mux.fusion.desk import Mesh, Premises
from megatron_mux.fusion.plan import dumps
from megatron_mux.fusion.planner import Planner
from tests.unit.fusion import backbone

MESH = Mesh(1, 2, 1)
LOADS = {name: backbone.load(name, [16 * (i + 1)] * 4) for i, name in enumerate("abcd")}

Edit = Callable[[dict[str, Any]], None]


def planned() -> dict[str, Any]:
    planner = Planner(Premises(backbone.profile(), backbone.info(), MESH, micro_batches=2, chunk=32))
    found: dict[str, Any] = json.loads(dumps(planner.fixed("temporal", LOADS)))
    assert len(found["buckets"]) == 4 and any(max(b["chunks"]) > 1 for b in found["buckets"])
    return found


def refused(value: dict[str, Any], directory: Path, mesh: Mesh = MESH, tasks: str = "abcd") -> list[str]:
    (directory / "plan.json").write_text(json.dumps(value))
    with pytest.raises(UserError) as told:
        check_plan(read_plan(directory / "plan.json"), backbone.info().fingerprint, mesh, list(tasks))
    return told.value.problems


def test_a_plan_as_the_tool_prints_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**planned(), "planning_s": 0.1, "flags": "", "mesh": []}))
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


def _swap_buckets(value: dict[str, Any]) -> None:
    value["buckets"].reverse()


def _backward_first(value: dict[str, Any]) -> None:
    row = value["template"][1]
    row.insert(0, row.pop(next(i for i, text in enumerate(row) if "B" in text)))


def _forget(value: dict[str, Any]) -> None:
    value["template"][0].pop(3)


def _repeat(value: dict[str, Any]) -> None:
    value["template"][0].append(value["template"][0][0])


def _misspell(value: dict[str, Any]) -> None:
    value["template"][1][2] = "1X0.0"


def _another_order(value: dict[str, Any]) -> None:
    """Still runnable, but not what the buckets say: gpipe."""
    for row in value["template"]:
        row.sort(key=lambda text: [kind in text for kind in "UNB"])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (_drop, "buckets: 'b' of this run is in none"),
        (_twice, "is at buckets[0].hybrid_tasks[0].tasks[0] already"),
        (_swap_buckets, "buckets enter in descending order"),
        (_backward_first, "comes before the forward of its last chunk"),
        (_forget, "is missing"),
        (_repeat, "is there twice"),
        (_misspell, "template[1][2]: '1X0.0' is not an action"),
        (_another_order, "the plan's buckets make it"),
        (lambda value: value["template"].pop(), "template: has 1 rows for 2 rank(s)"),
        (
            lambda value: value["buckets"][0].update(forward=[1.0]),
            "buckets[0].forward: has 1 entries, 2 are needed",
        ),
        (lambda value: value["buckets"][0].update(forward=[]), "buckets[0]: has no predicted seconds"),
        (lambda value: value["buckets"][0].update(chunk=None), "its packs are not cut, yet"),
        (lambda value: value["buckets"][0].update(micro_batches=1), "the bucket has 1"),
        (
            lambda value: value.update(activation_limit=[1.0, 1.0]),
            "activation_limit: one micro-batch of bucket 0",
        ),
        (
            lambda value: value.update(template=[], activation_limit=[1.0, 1.0]),
            "activation_limit: one micro-batch",
        ),
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


@pytest.mark.parametrize("edit", [_backward_first, _repeat, _another_order])
def test_the_offending_cell_is_marked(edit: Edit, tmp_path: Path) -> None:
    value = planned()
    edit(value)
    (problem,) = refused(value, tmp_path)
    assert ">" in problem and "<" in problem and "rank 0:" in problem


@pytest.mark.parametrize(("text", "said"), [("{", "is no JSON"), ("[]", "must be one JSON object")])
def test_what_is_no_plan_file(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=said):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "nowhere.json")
