"""Launches, waits and kept bytes of a step, counted on a fake GPU: they do not grow with the number of tasks."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_launches_do_not_grow_with_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    counted = importlib.import_module("launches").counted
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
