"""When a run is saved, and what a save says of its tasks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import BestEvaluation, LossHealth, StepResult
from megatron_mux.tasks import TrainingSpec
from megatron_mux.tasks.life import State, TaskLives
from megatron_mux.training.callbacks.saves import Saves, SaveTimes
from megatron_mux.training.step_loop import StepLoop
from megatron_mux.training.task_registry import TaskRegistry


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


def saved(*entries: SavedTask, leaving: tuple[str, ...] = ()) -> list[str]:
    """What is saved of tasks at step 8, all but `failed` as they go on; returns the names of those whose state is."""
    copied: list[str] = []
    training = SimpleNamespace(save_total_limit=None, keeps_best=False)
    task = SimpleNamespace(spec=SimpleNamespace(training=training), data=[0], evaluation=None)
    engine: Any = SimpleNamespace(
        tasks=[entry.name for entry in entries if entry.name != "left"],
        task=lambda name: task,
        progress=lambda name: (8, 20, "failed" if name.startswith("failed") else "running"),
        adapter_config=lambda name: {},
        copy_states=lambda names, memory: copied.extend(names),
        parallel=SimpleNamespace(rank=1),
    )
    lives = TaskLives()
    for entry in entries:
        lives.begin(entry.name, "waiting").to("running")
        end = entry.name.split("-")[0]
        if end in ("failed", "paused"):
            lives[entry.name].to(cast(State, end), f"it {end}")
    registry: Any = SimpleNamespace(
        engine=engine, entries={entry.name: entry for entry in entries}, lives=lives
    )
    registry.update_entries = lambda: TaskRegistry.update_entries(registry)
    saver: Any = SimpleNamespace(memory=None, begin=lambda *arguments: None)
    Saves(registry, saver, Path("backbone"), StepLoop(False, False), 0).save(leaving)
    return copied


def entry_of(name: str, step: int, good: bool = True) -> SavedTask:
    checkpoint = f"{name}/checkpoint-{step}"
    return SavedTask(
        name, step, "running", "", checkpoint, {}, "", f"{name}/checkpoint-4", LossHealth(good=good)
    )


def test_a_save_says_who_leaves_and_falls_back_to_the_last_good_adapter() -> None:
    entries = [
        entry_of("goes-on", 6), entry_of("leaves", 6), entry_of("not-moved", 8), entry_of("failed", 6, good=False),
        entry_of("failed-by-data", 6), entry_of("left", 6), entry_of("paused", 6),
    ]  # fmt: skip
    assert saved(*entries, leaving=("leaves",)) == ["goes-on", "leaves", "failed-by-data", "paused"]
    assert {entry.name: entry.reason for entry in entries if entry.reason} == {
        "failed": "it failed", "failed-by-data": "it failed", "paused": "it paused",
    }  # fmt: skip
    assert {entry.name: (entry.status, entry.step) for entry in entries} == {
        "goes-on": ("running", 8),
        "leaves": ("removed", 8),
        "not-moved": ("running", 8),
        "failed": ("failed", 4),
        "failed-by-data": ("failed", 8),
        "left": ("running", 6),
        "paused": ("paused", 8),
    }
