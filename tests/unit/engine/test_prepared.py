"""Steps prepared ahead: the same steps, the same failures, and nothing that outlives its task."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning, StepResult
from megatron_mux.engine import prepared as room
from megatron_mux.engine.prepared import PreparedStep, prepare_step
from megatron_mux.errors import UserError
from megatron_mux.runtime import initialize
from tests import tiny_models
from tests.end_to_end.families import FAMILIES, lora
from tests.end_to_end.harness import Case, random_records

STEPS = 6


class Wrapped:
    """Records that are read in another way."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def __getattr__(self, name: str) -> Any:
        return getattr(self.records, name)

    def __len__(self) -> int:
        return len(self.records)


class Spoilt(Wrapped):
    """Records of which one cannot be read from a certain moment on."""

    def __init__(self, records: Any, bad: int, error: Exception) -> None:
        super().__init__(records)
        self.bad, self.error = bad, error

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise self.error
        return self.records[index]


class Held(Wrapped):
    """Records that no other thread than the main one gets before `go` is set."""

    def __init__(self, records: Any) -> None:
        super().__init__(records)
        self.entered, self.go, self.reading = threading.Event(), threading.Event(), False

    def __getitem__(self, index: int) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.reading = True
            self.entered.set()
            assert self.go.wait(60)
            self.reading = False
        return self.records[index]


def cases_of() -> list[Case]:
    training = {"per_device_train_batch_size": 3, "max_steps": STEPS, "learning_rate": 1e-2}
    adapter = lora(FAMILIES["llama"].query_value, r=4, lora_dropout=0.2)
    return [
        Case(name, adapter, training, random_records(18, 96, 4, 12, seed=i)) for i, name in enumerate("ab")
    ]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    parallel = initialize(device="cpu")
    backbone = Backbone.load(tiny_models.make(tmp_path, "llama"), parallel, torch.float64)
    return Engine(backbone, parallel, Planning("temporal", 1, micro_batches=2))


Prepared = list[tuple[bool, tuple[int, ...]]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """For each step that was prepared, whether by the main thread, and which step of each task it was."""
    calls: Prepared = []

    def note(plan: Any, tasks: Any, steps: Any, *more: Any) -> PreparedStep:
        calls.append((threading.current_thread() is threading.main_thread(), tuple(steps.values())))
        return prepare_step(plan, tasks, steps, *more)

    monkeypatch.setattr(room, "prepare_step", note)
    return calls


def results_of(engine: Engine, bursts: tuple[int, ...]) -> list[dict[str, StepResult]]:
    return [result for most in bursts for result in engine.steps(most)]


def test_the_next_burst_is_prepared_while_one_runs(
    engine: Engine, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for ahead in (True, False):
        if not ahead:
            monkeypatch.setattr(engine._runner.read_ahead, "prepare_next", lambda count: None)
        engine.register_tasks([case.task for case in cases_of()])
        prepared.clear()
        found.append(results_of(engine, (1, 1, 2, 2)))
        by_main = [steps[0] for is_main, steps in prepared if is_main]
        # The first step, and the second one of the first burst with two.
        assert by_main == ([0, 3] if ahead else list(range(STEPS)))
        assert sorted(steps for _, steps in prepared) == [(step, step) for step in range(STEPS)]
        for name in engine.tasks:
            engine.remove_task(name)
    assert found[0] == found[1] and len(found[0]) == STEPS


@pytest.mark.parametrize("bursts", [(1,) * STEPS, (2, 4), (STEPS,)])
def test_a_task_fails_at_the_step_that_cannot_be_read(engine: Engine, bursts: tuple[int, ...]) -> None:
    first, second = (case.task for case in cases_of())
    first.data = Spoilt(first.data, bad=10, error=UserError("the file has changed"))  # type: ignore[assignment]
    engine.register_tasks([first, second])
    found: list[dict[str, StepResult]] = []
    while engine.active:
        found += engine.steps(bursts[min(len(found), len(bursts) - 1)])
    assert [found[i]["a"].status for i in range(4)] == ["running"] * 3 + ["failed"]
    assert (found[3]["a"].reason, found[3]["a"].step) == ("the file has changed", 3)
    assert [result["b"].step for result in found] == list(range(1, STEPS + 1))


def test_what_else_goes_wrong_shows_when_its_step_is_due(engine: Engine) -> None:
    task = cases_of()[0].task
    task.data = Spoilt(task.data, bad=4, error=ZeroDivisionError("a mistake"))  # type: ignore[assignment]
    engine.register_tasks([task])
    engine.step()
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        engine.step()


def test_a_task_that_leaves_while_its_next_step_is_prepared_is_forgotten(engine: Engine) -> None:
    """Its memory is free at once, nobody reads its data any more, and the other one takes its own steps."""
    first, second = (case.task for case in cases_of())
    held = first.data = Held(first.data)  # type: ignore[assignment]
    engine.register_tasks([first, second])
    engine.step()
    assert held.entered.wait(60)
    gone: list[weakref.ref[Any]] = [
        weakref.ref(engine._tasks["a"]),
        weakref.ref(engine.adapters.tasks["a"].flat_params.values),
    ]
    threading.Timer(0.2, held.go.set).start()
    engine.remove_task("a")
    assert not held.reading
    gc.collect()
    assert [one() for one in gone] == [None, None]
    alone = cases_of()[1]
    steps = results_of(engine, (1, 1))
    assert [step["b"].step for step in steps] == [2, 3]
    engine.remove_task("b")
    engine.register_tasks([alone.task])
    assert [step["b"].loss for step in results_of(engine, (1, 2))[1:]] == [step["b"].loss for step in steps]


def test_a_task_of_the_same_name_gets_its_own_steps(engine: Engine, prepared: Prepared) -> None:
    engine.register_tasks([case.task for case in cases_of()])
    loss = results_of(engine, (1, 1))[1]["a"].loss
    engine.remove_task("a")
    other = cases_of()[0]
    other.records.pairs = other.records.pairs[::-1]
    engine.register_tasks([other.task])
    steps = results_of(engine, (1, 1))
    assert [step["a"].step for step in steps] == [1, 2] and steps[1]["a"].loss != loss


def test_a_task_that_has_done_its_last_step_may_be_finished_early(engine: Engine) -> None:
    """Its patience may be over with the evaluation after that step."""
    engine.register_tasks([case.task for case in cases_of()])
    results_of(engine, (STEPS,))
    engine.finish_early("a")
    assert engine.progress("a") == (STEPS, STEPS, "finished")
