"""Launches, waits and kept bytes of a step, counted on a fake GPU: they do not grow with the number of tasks."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("launches").counted


def test_launches_do_not_grow_with_the_tasks(counted: Any) -> None:
    (joined, one), (joined_many, many) = (counted(tasks, "all-linear", dropout=0.1) for tasks in (1, 64))
    assert many.forward == one.forward <= 10
    assert many.backward == one.backward <= 14
    assert many.norm + many.update + many.options == one.norm + one.update + one.options <= 40
    assert many.options == 1 and many.others == one.others
    assert not one.waits and not many.waits
    # Tables are copied after tasks came or went, without waiting: two for each of 4 BaseOps in 2 layers, 3 of updates.
    assert joined_many.tables == joined.tables == 2 * 4 * 2 + 3 and not many.tables
    assert not joined_many.waits
    assert counted(1, "all-linear", dropout=0.0)[1].kept == one.kept


def test_nor_do_those_of_kinds_that_act_on_rows(counted: Any) -> None:
    kinds = ("ia3", "bottleneck", "prefix")
    (joined, one), (joined_many, many) = (counted(tasks, "default", 0.0, kinds) for tasks in (3, 63))
    # At linear_fc2 the input is copied and scaled, the output is copied, and a bottleneck has three operations.
    assert many.forward == one.forward == 2 + 1 + 1 + 3
    # Of bottlenecks: a copy, and operations of five launches.
    assert many.backward == one.backward == 1 + 5
    # A prefix adds to its gradients of keys and of values, in two layers and two micro-batches.
    assert many.others - one.others == {"add_": 2 * 2 * 2 * 20} and not one.others - many.others
    assert not many.waits
    # Factors at linear_qkv and linear_fc2, bottlenecks at linear_proj and linear_fc2.
    assert joined_many.tables == joined.tables == 2 * 4 * 2 + 3 and not many.tables
    assert not joined_many.waits


def test_nor_do_those_of_experts(counted: Any) -> None:
    (joined, few), (joined_many, many) = (
        counted(tasks, "qv", 0.0, experts=experts) for tasks, experts in ((2, 8), (16, 64))
    )
    assert many.experts == few.experts <= 51, "a layer's, its router and the order of pairs included"
    assert many.experts_backward == few.experts_backward <= 5
    assert many.others == few.others
    assert not many.waits and not joined_many.waits
    assert joined_many.tables == joined.tables and not many.tables
