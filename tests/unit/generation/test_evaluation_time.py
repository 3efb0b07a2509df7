"""Predicted seconds of an evaluation: what sharing passes gains, and where nothing is to be gained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.evaluation_time import EvaluatedLoad, predicted_evaluation
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS, tokens_per_pass
from tests.unit.fusion import backbone


def context(ranks: int) -> PlanningContext:
    return PlanningContext(backbone.profile(), backbone.info(), Mesh(pipeline=ranks))


def loads(count: int, records: int, times: float = 1.0) -> dict[str, EvaluatedLoad]:
    (one,) = list(backbone.random_loads(3).values())[:1]
    own = replace(one, tokens=(32,) * records, labels=(1,) * records)
    return {f"task-{i}": EvaluatedLoad(replace(own, name=f"task-{i}"), times) for i in range(count)}


def test_one_task_takes_what_it_takes() -> None:
    alone = predicted_evaluation(context(1), loads(1, 64))
    assert alone.together_s == pytest.approx(alone.one_by_one_s)
    longer = predicted_evaluation(context(1), loads(1, 64, times=10.0))
    assert longer.together_s == pytest.approx(10 * alone.together_s, rel=0.01)


def test_small_evaluations_fill_a_pipeline_together() -> None:
    small, large = (predicted_evaluation(context(2), loads(8, records)) for records in (4, 1024))
    assert small.together_s < 0.65 * small.one_by_one_s
    assert 0.8 * large.one_by_one_s < large.together_s <= 1.01 * large.one_by_one_s


def test_tokens_of_a_pass() -> None:
    assert tokens_per_pass(10, 1) == TOKENS_PER_PASS
    assert [tokens_per_pass(total, 2) for total in (10, 8 * 200, 10**6)] == [128, 200, TOKENS_PER_PASS]
