"""When a run is saved, and what a save says of its tasks."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_mux.checkpoint import SavedTask, TaskToSave
from megatron_mux.engine import BestEvaluation, LossHealth, StepResult
from megatron_mux.tasks import TrainingSpec
from megatron_mux.tasks.life import State, TaskLives
from megatron_mux.training.callbacks.saves import Saves, SaveSchedule
from megatron_mux.training.step_loop import StepLoop
from megatron_mux.training.task_registry import TaskRegistry


def made(interval: int | None = None, **training: Any) -> SaveSchedule:
    """Of a task of 30 steps and 7 records, two a step, whose best evaluation is that of step 4."""
    spec = SimpleNamespace(training=TrainingSpec(**training), sequences_per_step=2)
    engine = SimpleNamespace(
        task=lambda name: SimpleNamespace(spec=spec, data=[0] * 7), progress=lambda name: (0, 30, "running")
    )
    entry = SavedTask("a", 0, "running", "", "", {}, "", best=BestEvaluation(value=1.0, step=4))
    registry: Any = SimpleNamespace(engine=engine, entries={"a": entry})
    return SaveSchedule(registry, interval)


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
def test_intervals_of_the_run_and_of_the_task(times: SaveSchedule, expected: list[int]) -> None:
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
def test_a_save_is_due(times: SaveSchedule, step: int, status: Any, expected: bool) -> None:
    result = StepResult(step, 30, 1.0, 1.0, 1e-3, 10, status)
    assert list(times.tasks_to_save({"a": result})) == ["a"] * expected


def saved(
    *entries: SavedTask,
    names: tuple[str, ...] | None = None,
    leaving: tuple[str, ...] = (),
    before: tuple[SavedTask, ...] = (),
) -> tuple[list[str], list[TaskToSave]]:
    """Save tasks at step 8, all but `failed` as they go on.

    Args:
        entries, names, leaving: See `save_run`.
        before: What the last save said of tasks.

    Returns:
        The names of those whose state is written, and what is said of each.
    """
    copied: list[str] = []
    told: list[TaskToSave] = []
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
        engine=engine,
        entries={entry.name: entry for entry in entries},
        saved={entry.name: copy.deepcopy(entry) for entry in (*entries, *before)},
        lives=lives,
    )
    registry.update_entries = lambda: TaskRegistry.update_entries(registry)
    saver: Any = SimpleNamespace(memory=None, begin=lambda states, *arguments: told.extend(states))
    Saves(registry, saver, Path("backbone"), StepLoop(False, False), 0).save(names, leaving)
    return copied, told


def entry_of(name: str, step: int, good: bool = True) -> SavedTask:
    checkpoint = f"{name}/checkpoint-{step}"
    return SavedTask(
        name, step, "running", "", checkpoint, {}, "", f"{name}/checkpoint-4", LossHealth(good=good)
    )


def test_a_task_that_was_saved_elsewhere_is_written_with_the_first_save() -> None:
    due, elsewhere = entry_of("due", 6), entry_of("elsewhere", 8)
    elsewhere.checkpoint = "/another/run/elsewhere/checkpoint-6"
    elsewhere.step = 6
    copied, told = saved(due, elsewhere, names=("due",))
    assert copied == ["due", "elsewhere"]
    assert [state.entry.checkpoint for state in told] == ["due/checkpoint-8", "elsewhere/checkpoint-8"]


def test_a_save_says_who_leaves_and_falls_back_to_the_last_good_adapter() -> None:
    entries = [
        entry_of("goes-on", 6), entry_of("leaves", 6), entry_of("not-moved", 8), entry_of("failed", 6, good=False),
        entry_of("failed-by-data", 6), entry_of("left", 6), entry_of("paused", 6),
    ]  # fmt: skip
    assert saved(*entries, leaving=("leaves",))[0] == ["goes-on", "leaves", "failed-by-data", "paused"]
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


def test_a_save_writes_the_tasks_that_it_is_due_for_and_names_the_last_checkpoints_of_others() -> None:
    due, other, parked = entry_of("due", 6), entry_of("other", 6), entry_of("paused", 6)
    before = copy.deepcopy(other)
    other.good, other.health.recent = (
        other.checkpoint,
        [2.0],
    )  # what a step said since then is not in its checkpoint
    copied, told = saved(due, other, parked, names=("due",), before=(before,))
    assert copied == ["due"]
    said = {state.entry.name: state.entry for state in told}
    assert said["due"].checkpoint == "due/checkpoint-8" and said["due"] is not due
    assert said["other"] == before
    assert (said["paused"].checkpoint, said["paused"].status) == ("paused/checkpoint-6", "paused")


@pytest.mark.parametrize(
    ("step", "good", "said"),
    [
        (6, True, "its last adapter is kept"),  # it ran out of memory
        (6, False, "its adapter before the failing step is kept (no earlier save is known to be good)"),
        (4, False, "its last good adapter is kept"),
    ],
)
def test_which_adapter_of_a_failed_task_is_kept_is_said(step: int, good: bool, said: str) -> None:
    told: list[str] = []
    registry: Any = SimpleNamespace(
        entries={"a": entry_of("a", step, good)}, reporter=SimpleNamespace(say=told.append)
    )
    saver: Any = SimpleNamespace(directory=Path("out"), wait=lambda: told.append("complete"))
    saves = Saves(registry, saver, Path("backbone"), StepLoop(False, False), 0)
    saves.task_done("a", StepResult(step, 30, 1.0, 1.0, 1e-3, 10, "running"))
    assert told == []
    saves.task_done("a", StepResult(step, 30, 1.0, 1.0, 1e-3, 10, "failed"))
    assert told == ["complete", f"a: {said}: out/a/checkpoint-{step}"]
