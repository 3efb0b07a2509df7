"""Runs whose tasks keep their best adapter, stop early, save on their own account and report to trackers."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from tests.end_to_end.forked import Fault, Server
from tests.end_to_end.outcome import assert_same_file, metrics
from tests.end_to_end.workplace import TASKS, Workplace

PATIENCE, THRESHOLD = 2, 0.01
TRAINING = {
    **TASKS["lora"]["training"],
    "learning_rate": 0.1,
    "max_steps": 40,
    "load_best_model_at_end": True,
    "early_stopping_patience": PATIENCE,
    "early_stopping_threshold": THRESHOLD,
    "save_total_limit": 1,
    "report_to": ["csv", "tensorboard"],
    "run_name": "first",
}
FILES = {
    "tuned": {**TASKS["lora"], "training": TRAINING, "eval": {"path": "held-out.jsonl", "eval_steps": 2}},
    "plain": {
        **TASKS["prefix"],
        "data": {
            "mixture": [{"path": "pairs.jsonl", "weight": 1}, {"path": "texts.jsonl", "weight": 2}],
            "max_length": 24,
        },
        "training": {**TASKS["prefix"]["training"], "optim": "adafactor", "save_steps": 2, "max_steps": 5},
    },
}


@pytest.fixture(scope="module")
def tasks(workplace: Workplace) -> Path:
    return workplace.write_tasks("keeping.yaml", FILES)


@pytest.fixture(scope="module")
def undisturbed(workplace: Workplace, server: Server, tasks: Path) -> Path:
    directory = workplace.root / "keeping"
    run = server.run(workplace.arguments("--save", directory, tasks=tasks))
    assert run.status == 0, run.errors
    return directory


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """Lines of evaluations after the first step."""
    return [line for line in metrics(directory, "tuned") if "eval_loss" in line and line["step"]]


def manifest(directory: Path) -> dict[str, Any]:
    """The newest one."""
    found: dict[str, Any] = json.loads(max((directory / "manifests").iterdir()).read_text())
    return found


def test_the_best_adapter_is_kept_and_a_task_stops_as_with_the_callback(undisturbed: Path) -> None:
    callback: Any = EarlyStoppingCallback(PATIENCE, THRESHOLD)
    callback_state: Any = type("State", (), {"best_metric": None})
    arguments: Any = type("Arguments", (), {"greater_is_better": False})
    best, stop = 0, 0
    for line in evaluations(undisturbed):
        assert not stop, "it goes on after its patience is over"
        callback.check_metric_value(arguments, callback_state, None, line["eval_loss"])
        if callback_state.best_metric is None or line["eval_loss"] < callback_state.best_metric:
            callback_state.best_metric, best = line["eval_loss"], line["step"]
        if callback.early_stopping_patience_counter >= PATIENCE:
            stop = line["step"]
    assert 0 < best < stop < 40
    (tuned,) = (task for task in manifest(undisturbed)["tasks"] if task["name"] == "tuned")
    assert (tuned["status"], tuned["step"]) == ("finished", stop)
    own = undisturbed / "tuned"
    kept = {path.name for path in own.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", f"checkpoint-{stop}"}, "the limit keeps the newest, and the best"
    assert_same_file(
        own / "best/adapter_model.safetensors", own / f"checkpoint-{best}/adapter_model.safetensors"
    )
    assert PeftConfig.from_pretrained(str(own / "best")).peft_type == "LORA"
    assert load_file(own / "best/adapter_model.safetensors")
    steps = {path.name for path in (undisturbed / "plain").glob("checkpoint-*")}
    assert {"checkpoint-2", "checkpoint-4", "checkpoint-5"} <= steps


def test_trackers_have_what_the_metrics_file_has(undisturbed: Path) -> None:
    wanted = {
        (line["step"], name): value
        for line in metrics(undisturbed, "tuned")
        for name, value in line.items()
        if name not in ("step", "wall_s")
    }
    with open(undisturbed / "tuned/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(int(row["step"]), row["metric"]): float(row["value"]) for row in rows} == pytest.approx(wanted)
    assert len(rows) == len(wanted)
    assert list((undisturbed / "tuned/runs/first").glob("events.*"))
    assert not (undisturbed / "plain/metrics.csv").exists()


def test_a_killed_run_goes_on_with_its_best_metric_and_patience(
    workplace: Workplace, server: Server, tasks: Path, undisturbed: Path
) -> None:
    directory = workplace.root / "killed-keeping"
    fault = Fault("megatron_mux.files:os.replace", 9, "kill after")
    arguments = workplace.arguments(
        "--save", directory, "--load", directory, "--save-interval", "1", tasks=tasks
    )
    assert server.run(arguments, fault=fault).status != 0
    run = server.run(arguments)
    assert run.status == 0, run.errors
    assert evaluations(directory) == evaluations(undisturbed)
    assert_same_file(*(path / "tuned/best/adapter_model.safetensors" for path in (directory, undisturbed)))
    (ours,), (theirs,) = (
        [t for t in manifest(path)["tasks"] if t["name"] == "tuned"] for path in (directory, undisturbed)
    )
    assert (ours["best"], ours["step"]) == (theirs["best"], theirs["step"])
    for path in (undisturbed / "plain/checkpoint-5").iterdir():
        assert_same_file(directory / "plain/checkpoint-5" / path.name, path)
    assert metrics(directory, "plain") == metrics(undisturbed, "plain")
    rows = (directory / "tuned/metrics.csv").read_text().splitlines()
    assert len(rows) == len(set(rows)) == len((undisturbed / "tuned/metrics.csv").read_text().splitlines())
