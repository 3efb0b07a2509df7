"""Launches, waits and kept bytes of a step, counted on a fake GPU: they do not grow with the number of tasks."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_launches_do_not_grow_with_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    counted = importlib.import_module("launches").counted
    one, many = (counted(tasks, "all-linear", dropout=0.1) for tasks in (1, 8))
    assert many.forward == one.forward <= 10
    assert many.backward == one.backward <= 14
    assert many.norm + many.update == one.norm + one.update <= 40
    assert many.others == one.others
    assert not one.waits and not many.waits
    assert counted(8, "all-linear", dropout=0.0).kept == many.kept
