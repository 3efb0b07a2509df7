"""The best evaluation and early stopping against `transformers`; the files that are kept of a task."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import EarlyStoppingCallback

from megatron_mux import files, saved_files
from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import BestEvaluation, EvalResult
from megatron_mux.saved_files import limit_checkpoints, prune, write_best
from megatron_mux.tasks import TaskSpec, TrainingSpec
from megatron_mux.training.best import BestCheckpointTracker, is_best

VALUES = random.Random(7).choices((1.0, 0.9, 0.85, 0.8, 0.795), k=40)


@pytest.mark.parametrize(("greater", "threshold"), [(False, 0.0), (False, 0.06), (True, 0.06)])
def test_patience_is_counted_as_by_the_callback(greater: bool, threshold: float) -> None:
    callback: Any = EarlyStoppingCallback(3, threshold)
    arguments, state = SimpleNamespace(greater_is_better=greater), SimpleNamespace(best_metric=None)
    found = BestEvaluation()
    for step, value in enumerate(VALUES, 1):
        callback.check_metric_value(arguments, state, None, value)
        # Trainer._determine_best_metric
        if state.best_metric is None or (np.greater if greater else np.less)(value, state.best_metric):
            state.best_metric, best_step = value, step
        found.note(step, value, greater, threshold)
        assert found.stale == callback.early_stopping_patience_counter
        assert (found.value, found.step) == (state.best_metric, best_step)
    assert found.stale, "some evaluation improved nothing"


def test_what_is_not_finite_is_never_the_best() -> None:
    found = BestEvaluation()
    assert not found.note(1, float("nan"), False, 0.0) and found.value is None
    assert found.note(2, 3.0, False, 0.0) and not found.note(3, float("-inf"), False, 0.0)
    assert (found.step, found.stale) == (2, 1)


def test_a_task_stops_once_its_patience_is_over() -> None:
    entry, said = SavedTask("a", 0, "running", "", "", {}, ""), list[str]()
    judge = BestCheckpointTracker({"a": entry}, said.append)
    training = TrainingSpec(metric_for_best_model="eval_rouge1", early_stopping_patience=2)
    for step, value in ((0, 9.0), (5, 0.5), (10, 0.4), (15, 0.5)):
        judge.note("a", training, step, EvalResult({"loss": 1.0, "rouge1": value}, 3))
        assert is_best(entry, step) == (step == 5)
    assert list(judge.stopped()) == ["a"] and not judge.stopped()
    assert "stops early at step 15" in said[-1] and "eval_rouge1 0.5000 of step 5" in said[-1]
    judge.note("a", training, 20, EvalResult({"loss": 1.0}, 3))
    assert "its evaluation has no rouge1" in said[-1]


def test_another_metric_begins_anew() -> None:
    entry = SavedTask("a", 0, "running", "", "", {}, "")
    judge = BestCheckpointTracker({"a": entry}, print)
    assert not is_best(entry, 0), "nothing was evaluated"
    for metric, values in (("loss", (0.5, 0.4, 0.6)), ("accuracy", (0.3, 0.2))):
        training = TrainingSpec(metric_for_best_model=metric, load_best_model_at_end=True)
        for step, value in enumerate(values, entry.best.step + 1):
            judge.note("a", training, step, EvalResult({metric: value}, 3))
    assert (entry.best.value, entry.best.step, entry.best.stale) == (0.3, 3, 1)


def spec(training: dict[str, Any], **evaluation: Any) -> TaskSpec:
    task: dict[str, Any] = {
        "name": "a",
        "adapter": {"peft_type": "LORA"},
        "data": {"path": "x"},
        "training": training,
        "eval": {"path": "y", **evaluation} if evaluation else None,
    }
    return TaskSpec.model_validate(task)


@pytest.mark.parametrize(
    ("training", "evaluation", "wrong"),
    [
        ({"load_best_model_at_end": True}, {}, "compares evaluations: add an eval section"),
        ({"early_stopping_patience": 2}, {}, "training.early_stopping_patience: compares evaluations"),
        ({"load_best_model_at_end": True, "metric_for_best_model": "bleu"}, {"eval_steps": 5}, "'bleu' is not"),
        ({"early_stopping_threshold": 0.1}, {"eval_steps": 5}, "threshold needs early_stopping_patience"),
        ({"save_steps": 2.5}, {}, "save_steps must be a whole number, or a share below 1"),
        ({"save_steps": 2, "save_strategy": "epoch"}, {}, "save_steps belongs to save_strategy: steps"),
        ({"report_to": "comet"}, {}, "'comet' is not supported: use one or a list of wandb, mlflow"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(training: dict[str, Any], evaluation: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong.replace("'", ".")):
        spec(training, **evaluation)


def test_defaults_of_the_trainer() -> None:
    assert TrainingSpec(save_strategy="steps").save_interval(1000, 7) == 500
    assert TrainingSpec(save_steps=0.25).save_interval(30, 7) == 8
    assert TrainingSpec(save_strategy="epoch").save_interval(30, 7) == 7
    assert (
        TrainingSpec().save_interval(30, 7) is None
        and TrainingSpec(save_strategy="no").save_interval(30, 7) is None
    )
    greater = {
        name: TrainingSpec(metric_for_best_model=name).is_greater_better for name in ("eval_loss", "accuracy")
    }
    assert greater == {"eval_loss": False, "accuracy": True}
    assert not TrainingSpec(metric_for_best_model="perplexity").is_greater_better
    assert not spec({"report_to": "csv", "save_steps": 3}).differences(spec({"optim": "adamw_torch"}))


def test_checkpoints_beyond_a_limit_go_with_the_saves_that_name_them(tmp_path: Path) -> None:
    def save(number: int, step: int, best: int) -> None:
        checkpoint = tmp_path / f"a/checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter_model.safetensors").write_text(str(step))
        (checkpoint / "training_state.safetensors").write_text("")
        entry = {
            "name": "a",
            "checkpoint": f"a/checkpoint-{step}",
            "good": "",
            "best": {"checkpoint": f"a/checkpoint-{best}"},
        }
        path = tmp_path / f"manifests/manifest-{number:08d}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"tasks": [entry]}))
        write_best(tmp_path, {"a": f"a/checkpoint-{best}"})
        prune(tmp_path, 3, "")
        limit_checkpoints(tmp_path, {"a": 2}, {f"a/checkpoint-{step}", f"a/checkpoint-{best}"}, "")

    for number, step in enumerate((3, 6, 9, 12), 1):
        save(number, step, best=min(step, 6))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "best", "checkpoint-12", "checkpoint-6", "checkpoint-9",
    ]  # fmt: skip
    assert (tmp_path / "a/best/adapter_model.safetensors").read_text() == "6"
    assert not (tmp_path / "a/best/training_state.safetensors").exists()
    assert len(list((tmp_path / "manifests").iterdir())) == 3, "of the first one, a checkpoint is gone"
    assert cast(Any, json.loads((tmp_path / "manifests/manifest-00000004.json").read_text()))["tasks"]


def test_a_best_adapter_reaches_the_disk_before_it_is_named_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a/checkpoint-3"
    source.mkdir(parents=True)
    (source / "adapter_model.safetensors").write_text("3")
    done: list[str] = []
    rename = os.rename

    def renamed(old: Path, new: Path) -> None:
        done.append("rename")
        rename(old, new)

    for module in (saved_files, files):
        monkeypatch.setattr(module, "sync_directory", lambda path: done.append(path.name))
    monkeypatch.setattr(os, "rename", renamed)
    write_best(tmp_path, {"a": "a/checkpoint-3"})
    assert done == [".partial-best", "rename", "a"]
