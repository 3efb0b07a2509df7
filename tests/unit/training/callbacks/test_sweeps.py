"""What a sampler is told of earlier trials, also of those that were refused, diverged, or are of a continued run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_mux import report
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.engine import EvalResult
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskFile, read_task_file, sampler
from megatron_mux.tasks.life import TaskLives
from megatron_mux.tasks.sampler import Trial
from megatron_mux.training.callbacks import sweeps as module
from megatron_mux.training.callbacks.sweeps import Sweeps
from megatron_mux.training.sweep_setup import with_saved_trials


class Reporter:
    """Keeps what it is told."""

    directory = None

    def __init__(self) -> None:
        self.said: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.history: dict[str, Any] = {}
        self.swept: dict[str, Any] = {}
        self.sweep_of: dict[str, str] = {}
        self.at_end: list[Any] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def append(self, name: str, line: dict[str, Any]) -> None:
        self.lines.append(line)


def sweeps_of(file: TaskFile, entries: Sequence[SavedTask] = (), reporter: Any = None) -> Sweeps:
    registry: Any = SimpleNamespace(
        entries={entry.name: entry for entry in entries},
        saved={},
        lives=TaskLives(),
        reporter=reporter or Reporter(),
        parallel=None,
    )
    for task in file.tasks:
        registry.lives.begin(task.name, "loading").to("running")
    return Sweeps(registry, file, "org/model", None, lambda: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with trials of a sampler, one of which is wrong."""
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    task = {
        "name": "s",
        "adapter": {"peft_type": "LORA"},
        "data": {"path": "d.jsonl"},
        "training": {"max_steps": 4},
        "eval": {"path": "d.jsonl"},
        "sweep": {"adapter.r": [4, 8, -1], "sampler": {"type": "tpe", "trials": 3, "at_once": 1}},
    }
    path = tmp_path / "tasks.yaml"
    path.write_text(json.dumps({"tasks": [task]}))
    return path


def choosing(monkeypatch: pytest.MonkeyPatch, *settings: dict[str, Any]) -> list[list[Trial]]:
    """Have the sampler choose these in turn; returns what it is told each time."""
    told: list[list[Trial]] = []

    def ask(sweep: Any, trials: Sequence[Trial], greater: bool) -> dict[str, Any]:
        told.append([*trials])
        return settings[len(told) - 1]

    monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(sampler, "ask", ask)
    monkeypatch.setattr(module, "computed_by_first", lambda compute, parallel: compute())
    return told


def test_a_figure_that_is_not_finite_is_told_as_such(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = choosing(monkeypatch, {"adapter.r": 4}, {"adapter.r": 8})
    file = read_task_file(path)
    sweeps = sweeps_of(file)
    (name,) = file.sweeps["s"].configurations
    sweeps.poll()
    sweeps.evaluated(name, 2, EvalResult({"loss": 1.0}, 1))
    sweeps.evaluated(name, 4, EvalResult({"loss": float("nan")}, 1))
    sweeps.registry.lives[name].to("finished")
    sweeps.poll()
    assert [trial.values for trial in told[1]] == [{2: 1.0, 4: None}]


def test_a_trial_that_is_refused_counts_also_in_a_run_that_continues(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = choosing(monkeypatch, *({"adapter.r": r} for r in (4, -1, 8, 4, 8)))
    file = read_task_file(path)
    (first,) = file.sweeps["s"].configurations
    sweeps = sweeps_of(file)
    sweeps.registry.lives[first].to("finished")
    sweeps.poll()
    sweeps.before_save()
    entries = [*sweeps.registry.entries.values()]
    wrong = entries[1]
    assert wrong.status == "refused" and "adapter.r" in wrong.reason
    assert sweeps.registry.lives[wrong.name].state == "refused" and len(entries) == 3

    saved = entries[:2]  # as if killed before the third one was chosen
    again = with_saved_trials(read_task_file(path), Manifest(1, "b", saved, {}))
    assert [task.name for task in again.tasks] == [first]
    continued = sweeps_of(again, saved)
    continued.registry.lives[first].to("finished")
    continued.poll()
    assert continued.registry.lives[wrong.name].reason == wrong.reason
    assert told[4] == told[2], "the sampler knows what it knew in the run that was killed"


def test_figures_of_the_run_that_is_continued_stay_without_a_scheduler(path: Path) -> None:
    file = read_task_file(path)
    (name,) = file.sweeps["s"].configurations
    entry = SavedTask(name, 4, "finished", "", "", file.tasks[0].plain(), "")
    own = entry.configuration
    own.sweep, own.settings = "s", dict(file.sweeps["s"].configurations[name])
    own.figure, own.evaluations, own.decided = "accuracy", {4: 0.5}, 4
    again = with_saved_trials(file, Manifest(1, "b", [entry], {}))
    assert again.scheduler is not None
    assert (again.scheduler.type, again.scheduler.figure, again.scheduler.is_greater_better) == (
        "none",
        "accuracy",
        True,
    )
    sweeps_of(again, [entry]).poll()
    assert own.evaluations == {4: 0.5}


@pytest.mark.parametrize("scheduler", [{"metric": "eval_loss"}, {"metric": "eval_accuracy", "mode": "min"}])
def test_another_metric_than_that_of_the_run_that_is_continued_is_refused(
    path: Path, scheduler: dict[str, str]
) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "scheduler": {"type": "none", **scheduler}}))
    file = read_task_file(path)
    (name,) = file.sweeps["s"].configurations
    entry = SavedTask(name, 4, "finished", "", "", file.tasks[0].plain(), "")
    own = entry.configuration
    own.sweep, own.settings = "s", dict(file.sweeps["s"].configurations[name])
    own.figure = "accuracy"
    with pytest.raises(UserError, match=r"compares by eval_accuracy \(max\), not by eval_.* set metric"):
        with_saved_trials(file, Manifest(1, "b", [entry], {}))


def test_without_evaluation_no_configuration_is_called_best(path: Path) -> None:
    file = read_task_file(path)
    (name,) = file.sweeps["s"].configurations
    sweeps = sweeps_of(file)
    sweeps.poll()
    sweeps.registry.entries[name].checkpoint = "s/checkpoint-4"
    life = sweeps.registry.lives[name]
    history = SimpleNamespace(step=4, loss=1.5, status="running", reason="", life=life, total_steps=4)
    sweeps.registry.reporter.history[name] = history  # type: ignore[assignment]
    sweeps.close()
    assert not any(str(line).startswith("best") for line in sweeps.registry.reporter.at_end)
    sweeps.evaluated(name, 4, EvalResult({"loss": 1.25}, 1))
    sweeps.close()
    assert any(str(line).startswith("best: s-r") for line in sweeps.registry.reporter.at_end)


def test_trackers_are_told_the_sweep(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    monkeypatch.setattr(report, "Trackers", lambda names, run, say: groups.append(run.group))
    file = read_task_file(path)
    sweeps = sweeps_of(file, reporter=report.Reporter(tmp_path / "run", None, 1, False, False))
    training = file.tasks[0].training.model_copy(update={"report_to": ["wandb"]})
    sweeps.registry.reporter.track(file.tasks[0].model_copy(update={"training": training}), 0)
    assert groups == ["s"]
