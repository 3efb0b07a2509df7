"""When a run is saved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import BestEvaluation, StepResult
from megatron_mux.tasks import TrainingSpec
from megatron_mux.training.callbacks.saves import SaveTimes


def made(interval: int | None = None, **training: Any) -> SaveTimes:
    """Of a task of 30 steps and 7 records, two a step, whose best evaluation is that of step 4."""
    spec = SimpleNamespace(training=TrainingSpec(**training), sequences_per_step=2)
    engine = SimpleNamespace(
        task=lambda name: SimpleNamespace(spec=spec, data=[0] * 7), progress=lambda name: (0, 30, "running")
    )
    entry = SavedTask("a", 0, "running", "", "", {}, "", best=BestEvaluation(value=1.0, step=4))
    registry: Any = SimpleNamespace(engine=engine, entries={"a": entry})
    return SaveTimes(registry, interval)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (made(), []),
        (made(10), [10]),
        (made(save_steps=3), [3]),
        (made(10, save_steps=0.5), [10, 15]),
        (made(save_strategy="epoch"), [4]),
    ],
)
def test_intervals_of_the_run_and_of_the_task(times: SaveTimes, expected: list[int]) -> None:
    assert list(times.intervals("a")) == expected


@pytest.mark.parametrize(
    ("times", "step", "status", "expected"),
    [
        (made(), 4, "running", False),
        (made(), 4, "failed", True),
        (made(), 30, "finished", True),
        (made(5, save_steps=3), 9, "running", True),
        (made(5, save_steps=3), 10, "running", True),
        (made(5, save_steps=3), 11, "running", False),
        (made(load_best_model_at_end=True), 4, "running", True),
        (made(load_best_model_at_end=True), 5, "running", False),
    ],
)
def test_a_save_is_due(times: SaveTimes, step: int, status: Any, expected: bool) -> None:
    assert times.asks_to_save({"a": StepResult(step, 30, 1.0, 1.0, 1e-3, 10, status)}) is expected
