"""Whose turn it is to be evaluated, and who stops early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import EvalResult, StepResult
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, TrainingSpec
from megatron_mux.training.best import BestCheckpointTracker
from megatron_mux.training.callbacks.evaluations import Evaluations


def result(step: int, status: Any = "running") -> StepResult:
    return StepResult(step, 20, 1.0, 1.0, 1e-3, 10, status)


class Engine:
    """Evaluates every task to the same figure; `plain` has nothing to be evaluated on."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted, self.wrong = noted, ""
        self.parallel = SimpleNamespace(heartbeat=SimpleNamespace(at=lambda what: None))

    def task(self, name: str) -> Any:
        section = None if name == "plain" else SimpleNamespace(eval_steps=5, metrics=())
        training = TrainingSpec(early_stopping_patience=1)
        adapter = SimpleNamespace(begins_as_backbone=False)
        spec = SimpleNamespace(name=name, eval=section, training=training, adapter=adapter)
        return SimpleNamespace(spec=spec, evaluation=None)

    def progress(self, name: str) -> tuple[int, int, str]:
        return 5, 20, "running"

    def evaluate_together(self, names: list[str]) -> dict[str, EvalResult | UserError]:
        self.noted.append(names)
        return {
            name: UserError("unreadable") if name == self.wrong else EvalResult({"loss": 1.0}, 3)
            for name in names
        }

    def finish_early(self, name: str) -> None:
        self.noted.append(f"finish {name}")


def made() -> tuple[Evaluations, list[Any]]:
    noted: list[Any] = []
    names = ("one", "two", "plain")
    entries = {name: SavedTask(name, 0, "running", "", "", {}, "") for name in names}
    reporter = SimpleNamespace(
        say=noted.append,
        history={name: SimpleNamespace(before=1, status="running") for name in names},
        evaluation=lambda name, step, result: noted.append((name, step)),
    )
    registry: Any = SimpleNamespace(engine=Engine(noted), entries=entries, reporter=reporter, callbacks=[])
    tracker = BestCheckpointTracker(entries, noted.append)
    return Evaluations(registry, tracker, lambda: noted.append("check")), noted


def test_whose_turn_it_is_together_and_the_directory_is_checked_first() -> None:
    evaluations, noted = made()
    last = {"one": result(5), "two": result(6), "plain": result(5)}
    evaluations.when_due(last)
    assert noted == [["one"], "check", ("one", 5)]
    noted.clear()
    evaluations.when_due({"one": result(7, "finished"), "two": result(10), "plain": result(7, "finished")})
    assert noted[0] == ["one", "two"], "after the last step, whichever it is"


def test_tasks_that_begin_as_the_bare_backbone_are_evaluated_once_before_their_first_step() -> None:
    evaluations, noted = made()

    def spec(name: str, evaluated_on: str = "held-out.jsonl", **adapter: Any) -> TaskSpec:
        return TaskSpec.model_validate(
            {
                "name": name,
                "adapter": {"peft_type": "LORA", **adapter},
                "data": {"path": "pairs.jsonl"},
                "training": {"max_steps": 4, "seed": len(name)},
                "eval": {"path": evaluated_on},
            }
        )

    specs = [
        spec("plain"), spec("wide", r=32), spec("drawn", init_lora_weights="gaussian"), spec("dora", use_dora=True),
        spec("random", init_lora_weights=False), spec("elsewhere", "other.jsonl"),
        spec("ia3", peft_type="IA3"), spec("factors", init_lora_weights="olora"),
    ]  # fmt: skip
    tasks = {own.name: SimpleNamespace(spec=own, evaluation=None) for own in specs}
    registry: Any = evaluations.registry
    registry.engine.task = tasks.__getitem__
    registry.entries.update({name: SavedTask(name, 0, "running", "", "", {}, "") for name in tasks})
    registry.reporter.history = {name: SimpleNamespace(before=1, status="running") for name in tasks}
    evaluations.before_first_step(list(tasks))
    assert noted[0] == ["plain", "dora", "random", "elsewhere", "ia3", "factors"]
    assert [own[0] for own in noted[2:]] == list(tasks), "every task gets the figures"


def test_a_task_that_failed_is_not_evaluated() -> None:
    evaluations, noted = made()
    evaluations.when_due({"one": result(5, "failed"), "two": result(6)})
    assert noted == []


def test_a_task_whose_patience_is_over_is_finished_everywhere() -> None:
    evaluations, noted = made()
    last = {"one": result(5), "two": result(6)}
    evaluations.when_due(last)
    assert last["one"].status == "running"
    evaluations.when_due(last)  # the figure is the same: it has not improved
    assert (last["one"].status, noted[-1]) == ("finished", "finish one")
    assert last["two"].status == "running"


def test_one_that_cannot_be_evaluated_is_said_and_the_others_go_on() -> None:
    evaluations, noted = made()
    engine: Any = evaluations.registry.engine
    engine.wrong = "one"
    evaluations.before_first_step(["one", "two"])
    assert noted[-2:] == ["one could not be evaluated: unreadable", ("two", 5)]
