"""Sweeps that are not the usual one: refused trials, another metric, and little memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.end_to_end.forked import Server
from tests.end_to_end.outcome import metrics
from tests.end_to_end.test_sweeps import ADAPTER, GRID, SECTIONS, TRAINING, decisions, results, train
from tests.end_to_end.workplace import Workplace


def write(workplace: Workplace, name: str, task: dict[str, Any], **top: Any) -> Path:
    path = workplace.root / name
    path.write_text(yaml.safe_dump({"defaults": SECTIONS, **top, "tasks": [task]}, sort_keys=False))
    return path


def test_a_trial_that_the_backbone_refuses_counts_and_the_run_can_be_continued(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    space = {
        "adapter.target_modules": [["q_proj"], ["nope"]],
        "training.learning_rate": [1.0e-3, 1.0e-2],
        "sampler": {"type": "tpe", "trials": 4, "at_once": 1, "seed": 6},
    }
    task = {"name": "words", "training": {"max_steps": 2}, "sweep": space}
    path = write(workplace, "refused.yaml", task)
    whole = train(server, workplace, path, tmp_path / "whole")
    assert whole.status == 0, whole.errors
    for more in (("--exit-interval", "3"), ("--load", str(tmp_path / "parts"))):
        run = train(server, workplace, path, tmp_path / "parts", *more)
        assert run.status == 0, run.errors
        assert re.search(r"^words-nope\S* refused: .*nope", run.output, re.MULTILINE), run.output
    rows = results(tmp_path / "whole")
    assert rows == results(tmp_path / "parts")
    assert [row["status"] for row in rows] == ["finished", "finished", "refused", "refused"]
    assert "'nope'" in rows[-1]["reason"]


def test_the_median_of_another_figure_decides_and_stays_the_figure_without_a_scheduler(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    scheduler = {"type": "median", "metric": "eval_perplexity", "mode": "max", "min_steps": 2}
    task = {
        "name": "odd",
        "training": {"max_steps": 6},
        "eval": {"eval_steps": 2, "metrics": ["perplexity"]},
        "sweep": GRID,
    }
    run = train(
        server, workplace, write(workplace, "median.yaml", task, scheduler=scheduler), tmp_path / "median"
    )
    assert run.status == 0, run.errors
    rows, made = results(tmp_path / "median"), decisions(tmp_path / "median")
    assert rows[0]["status"] == "finished" and {own["decision"] for own in made} == {"prune"}
    best = {
        line["step"]: line["eval_perplexity"]
        for line in metrics(tmp_path / "median", rows[0]["task"])
        if "eval_perplexity" in line
    }
    assert all(own["eval_perplexity"] < best[own["step"]] and "median" in own["reason"] for own in made)

    path = write(workplace, "in-full.yaml", task)
    run = train(server, workplace, path, tmp_path / "full", "--load", str(tmp_path / "median"))
    assert run.status == 0, run.errors
    rows = results(tmp_path / "full")
    assert {(row["steps"], row["evaluated_at"]) for row in rows} == {("6", "6")}
    figures = [float(row["eval_perplexity"]) for row in rows]
    assert figures == sorted(figures, reverse=True), "also of those that had finished before"

    changed = {**scheduler, "metric": "eval_loss"}
    path = write(workplace, "other.yaml", task, scheduler=changed)
    run = train(server, workplace, path, tmp_path / "other", "--load", str(tmp_path / "median"))
    assert (
        run.status == 2 and "scheduler.metric: the run that is continued compares by eval_perpl" in run.errors
    )


def test_room_that_becomes_free_is_taken_at_once(
    workplace: Workplace, server: Server, tmp_path: Path
) -> None:
    """There is room for one configuration at a time (see `test_admission`); the first is the best one."""
    task = {
        "name": "large",
        "adapter": {**ADAPTER, "r": 4096},
        "training": {**TRAINING, "max_steps": 4},
        "sweep": {"training.learning_rate": [1.0e-2, 1.0e-3, 1.0e-4]},
    }
    path = write(
        workplace, "large-sweep.yaml", task, scheduler={"type": "halving", "min_steps": 2, "factor": 2}
    )
    flags: list[str | Path] = [
        "--save",
        tmp_path,
        "--mux-fp32",
        "--mux-memory-limit",
        "56MiB",
        "--log-interval",
        "1",
    ]
    run = server.run(workplace.arguments(*flags, tasks=path))
    assert run.status == 0, run.errors
    lines = run.output.splitlines()
    stopped = [i for i, line in enumerate(lines) if " stops: " in line]
    assert len(stopped) >= 2
    for i in stopped[:2]:
        rest = lines[i + 1 :]
        taken = next(k for k, line in enumerate(rest) if line.endswith("trains from here on"))
        assert not any(": step " in line for line in rest[:taken]), rest[:taken]
    assert sorted(row["steps"] for row in results(tmp_path)) == ["2", "2", "4"]
