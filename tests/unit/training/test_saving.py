"""Saves in the background: exact copies of a moment, one at a time, and no failure unheard."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux import checkpoint
from megatron_mux.backbone.model import Backbone
from megatron_mux.checkpoint import SavedTask, TaskToSave
from megatron_mux.engine import Engine, Planning
from megatron_mux.engine.snapshot import LocalState, Snapshot
from megatron_mux.errors import UserError
from megatron_mux.runtime import Parallel, initialize
from megatron_mux.training.saving import Saver
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, diff_pruning, lora
from tests.end_to_end.harness import Case, random_records


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    parallel = initialize(device="cpu")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.float64)
    engine = Engine(backbone, parallel, Planning("spatial", 1))
    targets = FAMILIES["llama"].query_value
    training = {"per_device_train_batch_size": 2, "max_steps": 9, "learning_rate": 1e-2}
    adapters = {"lora": lora(targets, r=4), "pruned": diff_pruning(targets)}
    engine.register_tasks(
        [
            Case(name, adapter, training, random_records(6, 96, 4, 12, seed=0)).task
            for name, adapter in adapters.items()
        ]
    )
    yield engine
    engine.close()


@pytest.fixture
def saver(engine: Engine, tmp_path: Path) -> Iterator[Saver]:
    saver = Saver(tmp_path / "run", "backbone", None, None, engine.parallel)
    yield saver
    saver.close()


def save(engine: Engine, saver: Saver) -> list[SavedTask]:
    steps = {name: engine.progress(name)[0] for name in engine.tasks}
    states = [
        TaskToSave(SavedTask(name, step, "running", "", checkpoint.checkpoint_of(name, step), spec, "data"))
        for name, step in steps.items()
        for spec in [engine.task(name).spec.plain()]
    ]
    saver.begin(states, engine.copy_states(engine.tasks, saver.memory), engine.plan)
    return [state.entry for state in states]


def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have saves wait, before their states are gathered, until the event is set."""
    go, real = threading.Event(), checkpoint.save

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert go.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", slow)
    return go


def assert_saved(saver: Saver, entry: SavedTask, wanted: Any) -> None:
    found = checkpoint.load_task(saver.directory, entry)
    assert found.step == wanted.step and found.adapter.keys() == wanted.adapter.keys()
    for key, tensor in wanted.adapter.items():
        assert torch.equal(found.adapter[key], tensor), key
    assert found.moments.keys() == wanted.moments.keys() and wanted.moments
    for key, named in wanted.moments.items():
        assert all(torch.equal(found.moments[key][name], tensor) for name, tensor in named.items()), key
    assert all(torch.equal(found.extra[key], tensor) for key, tensor in wanted.extra.items())


def test_steps_meanwhile_do_not_change_what_is_saved(
    engine: Engine, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = held(monkeypatch)
    for _ in range(7):  # the pruned task's mask is frozen by then
        engine.step()
    wanted = {name: engine.snapshot(name) for name in engine.tasks}
    entries = save(engine, saver)
    assert [entry.checkpoint for entry in entries] == ["lora/checkpoint-7", "pruned/checkpoint-7"]
    engine.step()
    engine.remove_task("pruned")
    assert not saver.is_done and not list(saver.directory.rglob("*"))
    go.set()
    saver.wait()
    for entry in entries:
        assert_saved(saver, entry, wanted[entry.name])


def test_the_next_save_waits_for_the_one_before(
    engine: Engine, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = held(monkeypatch)
    engine.step()
    first = save(engine, saver)
    wanted = {name: engine.snapshot(name) for name in engine.tasks}
    threading.Timer(0.2, go.set).start()
    engine.step()
    saver.wait()
    second = save(engine, saver)
    saver.wait()
    manifest = checkpoint.load(saver.directory, "backbone")
    assert manifest is not None and (manifest.number, [task.step for task in manifest.tasks]) == (2, [2, 2])
    for before, after in zip(first, second, strict=True):
        assert_saved(saver, before, wanted[before.name])
        assert_saved(saver, after, engine.snapshot(after.name))


def test_a_task_that_cannot_be_written_leaves_no_rank_waiting(
    engine: Engine, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[int] = []
    gather = LocalState.gather

    def gathering(state: LocalState, *arguments: Any) -> Snapshot | None:
        gathered.append(state.step)
        return gather(state, *arguments)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalState, "gather", gathering)
    for task_part in (checkpoint, saver._cards):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(task_part, "write_tensors" if task_part is checkpoint else "card", full)
            save(engine, saver)
            with pytest.raises(UserError, match="No space left"):
                saver.wait()
        saver.problem = ""
        assert len(gathered) == 2, "other ranks send what they have of each task"
        gathered.clear()


def test_a_save_that_fails_is_a_problem_until_somebody_hears_of_it(
    engine: Engine, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(checkpoint, "write", full)
    engine.step()
    save(engine, saver)
    while not saver.is_done:
        time.sleep(0.01)
    assert "No space left on device" in saver.problem, "before anybody waits for it"
    with pytest.raises(UserError, match=r"could not save: No space left on device \(somewhere\).*--load"):
        saver.wait()
    assert "No space left on device" in saver.problem
    assert checkpoint.load(saver.directory, "backbone") is None


def test_a_defect_in_the_background_is_a_problem_too(
    engine: Engine, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: 1 / 0)
    save(engine, saver)
    with pytest.raises(UserError, match="the save failed: ZeroDivisionError: division by zero"):
        saver.before_save()


def test_whoever_waits_lifts_the_limit(engine: Engine, tmp_path: Path) -> None:
    saver = Saver(tmp_path / "slow", "backbone", None, 1, engine.parallel)  # a byte a second
    engine.step()
    save(engine, saver)
    saver.wait()
    saver.close()
    assert checkpoint.load(saver.directory, "backbone") is not None


def test_ranks_agree_that_a_checkpoint_cannot_be_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them may have read it."""
    heard: list[str] = []

    def first_problem(problem: str, _: Parallel) -> str:
        heard.append(problem)
        return problem

    def unreadable() -> Snapshot:
        raise UserError("cannot be read")

    monkeypatch.setattr("megatron_mux.engine.engine.first_problem", first_problem)
    task = replace(engine.task("lora"), resume=unreadable, life=None)
    engine.remove_task("lora")
    with pytest.raises(UserError, match="cannot be read"):
        engine.register_tasks([task])
    assert heard == ["cannot be read"] and list(engine.tasks) == ["pruned"]
