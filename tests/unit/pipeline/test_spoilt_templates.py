"""Templates and plans with one thing wrong are refused before a run computes or sends anything."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_mux.errors import UserError
from megatron_mux.fusion.check import check_plan
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.plan import Plan, dumps
from megatron_mux.fusion.step import step_template
from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.check import TemplateError, check
from tests.distributed.random_plans import BACKBONE, Case, cases

EXAMPLES = 15  # of each fault

Rows = list[list[Action]]
Json = dict[str, Any]

drawn = st.tuples(st.integers(2, 4), st.integers(1, 2)).flatmap(lambda mesh: cases(*mesh))

# -- templates: each changes what it is given


def _drop(rows: Rows, r: Random) -> None:
    row = r.choice(rows)
    row.pop(r.randrange(len(row)))


def _twice(rows: Rows, r: Random) -> None:
    row = r.choice(rows)
    row.insert(r.randrange(len(row) + 1), r.choice(row))


def _elsewhere(rows: Rows, r: Random) -> None:
    """To another rank."""
    source, target = r.sample(rows, 2)
    target.insert(r.randrange(len(target) + 1), source.pop(r.randrange(len(source))))


def _rows_exchanged(rows: Rows, r: Random) -> None:
    rows.insert(0, rows.pop(r.randrange(1, len(rows))))


def _row_lost(rows: Rows, r: Random) -> None:
    rows.pop(r.randrange(len(rows)))


def _unknown_chunk(rows: Rows, r: Random) -> None:
    row = r.choice(rows)
    i = r.randrange(len(row))
    field = r.choice(["bucket", "micro_batch", "chunk", "stage"])
    other: dict[str, Any] = {field: 99}
    row[i] = replace(row[i], **other)


def _backward_first(rows: Rows, r: Random) -> None:
    row = r.choice(rows)
    forwards = [action for action in row if action.kind == "F"]
    if not forwards:  # this pipeline has nothing to compute
        _drop(rows, r)
        return
    forward = r.choice(forwards)
    row.remove(backward := Action.of(forward.stage, "B", forward.chunk_id))
    row.insert(r.randrange(row.index(forward) + 1), backward)


def _no_ends(rows: Rows, r: Random) -> None:
    """One stage never sums up, or never steps."""
    row, kind = r.choice(rows), r.choice(["N", "U"])
    row[:] = [action for action in row if action.kind != kind]


def _neighbours_disagree(rows: Rows, r: Random) -> None:
    """Two passes of one kind of a stage change places, on it alone."""
    row, kind = r.choice(rows), r.choice(["F", "B"])
    stages = sorted({action.stage for action in row})
    stage = r.choice(stages)
    places = [i for i, action in enumerate(row) if (action.kind, action.stage) == (kind, stage)]
    if len(places) < 2:
        _drop(rows, r)
        return
    i, j = r.sample(places, 2)
    row[i], row[j] = row[j], row[i]


WRONG = (
    _drop,
    _twice,
    _elsewhere,
    _rows_exchanged,
    _row_lost,
    _unknown_chunk,
    _backward_first,
    _no_ends,
    _neighbours_disagree,
)


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
@settings(max_examples=EXAMPLES)
@given(drawn, st.integers(0, 1 << 30))
def test_a_spoilt_template_is_refused(spoil: Callable[[Rows, Random], None], case: Case, seed: int) -> None:
    plan, sizes = case.plan, case.sizes(0)
    made = step_template(plan, sizes)
    assume(all(any(action.is_pass for action in row) for row in made))
    check(made, sizes, plan.stages, len(plan.buckets), plan.virtual)
    rows = [list(row) for row in made]
    spoil(rows, Random(seed))
    with pytest.raises(TemplateError):
        check(tuple(map(tuple, rows)), sizes, plan.stages, len(plan.buckets), plan.virtual)


# -- plan files: each changes what it is given into what can be no plan of this run


def _bucket(value: Json, r: Random) -> Json:
    found: Json = r.choice(value["buckets"])
    return found


def _missing(value: Json, r: Random) -> None:
    of, name = r.choice(
        [
            (value, "policy"),
            (value, "stages"),
            (value, "buckets"),
            (value, "format"),
            (_bucket(value, r), "micro_batches"),
            (_bucket(value, r), "hybrid_tasks"),
            (r.choice(_bucket(value, r)["hybrid_tasks"]), "tasks"),
        ]
    )
    del of[name]


def _unknown_key(value: Json, r: Random) -> None:
    r.choice([value, value["weights"], _bucket(value, r), _bucket(value, r)["hybrid_tasks"][0]])["colour"] = 1


def _no_count(value: Json, r: Random) -> None:
    of, name = r.choice([(value, "stages"), (value, "data"), (_bucket(value, r), "micro_batches")])
    of[name] = r.choice([0, -1, 1.5, "2", None, True, 10**9, [1]])


def _no_amount(value: Json, r: Random) -> None:
    wrong = r.choice([-1.0, math.nan, math.inf, "1", None])
    name = r.choice(["forward", "backward", "memory"])
    _bucket(value, r)[name] = [wrong] * value["stages"]


def _no_word(value: Json, r: Random) -> None:
    value[r.choice(["policy", "alignment"])] = r.choice(["greedy", "", 7, None, ["auto"]])


def _other_ranks(value: Json, r: Random) -> None:
    value[r.choice(["stages", "data", "tensor"])] += 1


def _other_backbone(value: Json, r: Random) -> None:
    value["backbone"] += "c"


def _task_twice(value: Json, r: Random) -> None:
    tasks = _bucket(value, r)["hybrid_tasks"][0]["tasks"]
    r.choice(_bucket(value, r)["hybrid_tasks"])["tasks"].append(r.choice(tasks))


def _task_lost(value: Json, r: Random) -> None:
    tasks = r.choice(_bucket(value, r)["hybrid_tasks"])["tasks"]
    tasks.pop(r.randrange(len(tasks)))


def _task_of_nobody(value: Json, r: Random) -> None:
    r.choice(_bucket(value, r)["hybrid_tasks"])["tasks"][0] = "nobody"


def _other_number_of_stages(value: Json, r: Random) -> None:
    name = r.choice(["forward", "backward", "memory", "transfer"])
    _bucket(value, r)[name] = [1.0] * (value["stages"] + 1)


def _other_format(value: Json, r: Random) -> None:
    value["format"] = r.choice([1, 5, 7, "6", None])


SPOIL: tuple[Callable[[Json, Random], None], ...] = (
    _missing,
    _unknown_key,
    _no_count,
    _no_amount,
    _no_word,
    _other_ranks,
    _other_backbone,
    _task_twice,
    _task_lost,
    _task_of_nobody,
    _other_number_of_stages,
    _other_format,
)


@pytest.mark.parametrize("spoil", SPOIL, ids=lambda spoil: spoil.__name__)
@settings(max_examples=EXAMPLES)
@given(drawn, st.integers(0, 1 << 30))
def test_a_spoilt_plan_file_is_refused(spoil: Callable[[Json, Random], None], case: Case, seed: int) -> None:
    plan, value = case.plan, json.loads(dumps(case.plan))
    mesh = Mesh(1, plan.stages // plan.virtual, plan.data, plan.split)
    check_plan(Plan.from_json(json.loads(dumps(plan))), BACKBONE, mesh, plan.tasks)
    spoil(value, Random(seed))
    with pytest.raises(UserError) as found:
        check_plan(Plan.from_json(value), BACKBONE, mesh, plan.tasks)
    assert found.value.problems
