"""Trackers of two tasks in one process, on disk: MLflow's file store, W&B offline; a continued task goes on there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_mux.trackers.registry import Trackers
from megatron_mux.trackers.tracker import TrackedRun


def track(name: str, tracker: str, root: Path, steps: range, step: int = 0) -> tuple[Trackers, list[str]]:
    """Report some steps of a task."""
    said: list[str] = []
    config = {"training": {"learning_rate": 1e-3}, "name": name}
    run = TrackedRun(
        name, f"run of {name}", "tests", root / name, step=step, config=config, group="the sweep"
    )
    trackers = Trackers([tracker], run, said.append)
    for at in steps:
        trackers.log(at, {"loss": 1.0 / at, "rewards/margins": float(at)})
        trackers.log(at, {"eval_loss": 2.0 / at})
    return trackers, said


def both(tracker: str, root: Path) -> None:
    """Two tasks at once; the second one is interrupted, and continues."""
    first, second = track("a", tracker, root, range(1, 4)), track("b", tracker, root, range(1, 3))
    for own, _ in (first, second):
        own.close(finished=False)
    again = track("b", tracker, root, range(3, 5), step=2)
    again[0].close(finished=True)
    assert not [*first[1], *second[1], *again[1]]


def test_mlflow_has_each_tasks_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    both("mlflow", tmp_path)
    for name, last in (("a", 3), ("b", 4)):
        client = mlflow.MlflowClient((tmp_path / name / "mlruns").as_uri())
        (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        assert run.info.run_name == f"run of {name}"
        assert run.info.status == ("FINISHED" if name == "b" else "KILLED")
        assert run.data.tags["sweep"] == "the sweep"
        assert run.data.params == {"training.learning_rate": "0.001"}
        history = client.get_metric_history(run.info.run_id, "eval_loss")
        assert [(one.step, one.value) for one in history] == [(at, 2.0 / at) for at in range(1, last + 1)]
        assert run.data.metrics["rewards/margins"] == last


def test_wandb_keeps_runs_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    both("wandb", tmp_path)
    runs = {name: list((tmp_path / name / "wandb").glob("offline-run-*")) for name in ("a", "b")}
    assert len(runs["a"]) == 1 and runs["b"]
    # offline-run-SECOND-NUMBER, and -1 behind it for another one in the same second
    numbers = {path.name.split("-")[3] for path in runs["b"]}
    assert len(numbers) == 1, "what is continued has the number of the run that it continues"
    assert all(list(path.glob("*.wandb")) for own in runs.values() for path in own)
    written = next(runs["a"][0].glob("*.wandb")).read_bytes()
    assert b"rewards/margins" in written and b"the sweep" in written
