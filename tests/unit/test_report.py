"""Files of metrics: what they hold, also when a run is continued, and what is said when they cannot be written."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_mux import report as module
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.engine import EvalResult, StepResult
from megatron_mux.errors import UserError
from megatron_mux.report import Reporter
from megatron_mux.task_table import TaskTable
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import TaskLife
from megatron_mux.trackers.tensorboard import EventFile


def strict(line: str) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    content: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return content


def spec_of(name: str, **training: Any) -> TaskSpec:
    fields = {"adapter": {"peft_type": "LORA"}, "data": {"path": "d"}}
    return TaskSpec.model_validate({"name": name, "training": training, **fields})


def reporter_of(directory: Path | None, tensorboard: Path | None = None) -> Reporter:
    reporter = Reporter(directory, tensorboard, 1, live=False, silent=False)
    reporter.add(spec_of("a"), TaskLife("running"), 0, 3)
    return reporter


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    reporter = reporter_of(tmp_path, tmp_path / "board")
    reporter.evaluation("a", 0, EvalResult({"loss": math.nan, "accuracy": 0.5}, 2))
    reporter.step("a", StepResult(1, 3, 2.5, math.inf, 0.1, 8, "running", router_aux_loss=4.25), 1.0)
    reporter.step("a", StepResult(1, 3, math.nan, math.nan, 0.1, 8, "failed", "its loss is nan", True), 1.0)
    reporter.close()
    evaluated, stepped = map(strict, (tmp_path / "a" / "metrics.jsonl").read_text().splitlines())
    assert evaluated == {"step": 0, "eval_loss": None, "eval_accuracy": 0.5}
    assert (stepped["step"], stepped["loss"], stepped["grad_norm"]) == (1, 2.5, None)
    assert stepped["router_aux_loss"] == 4.25


def test_tensorboard_reads_the_numbers(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    reporter = reporter_of(None, tmp_path / "board")
    reporter.evaluation("a", 0, EvalResult({"loss": 4.5, "accuracy": 0.5}, 2))
    reporter.step("a", StepResult(1, 3, 2.5, 1.5, 0.25, 8, "running"), 1.0)
    (file,) = (tmp_path / "board").iterdir()
    events = list(loader.LegacyEventFileLoader(str(file)).Load())
    assert events[0].file_version == "brain.Event:2", "and all that was reported can be read before the end"
    found = {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}
    assert found == {
        ("a/eval_loss", 0): 4.5,
        ("a/eval_accuracy", 0): 0.5,
        ("a/loss", 1): 2.5,
        ("a/grad_norm", 1): 1.5,
        ("a/learning_rate", 1): 0.25,
        ("a/tokens", 1): 8,
    }
    reporter.close()


def test_tasks_that_share_a_logging_dir_have_files_of_their_own(tmp_path: Path) -> None:
    reporter = reporter_of(None)
    specs = [spec_of(name, report_to="csv", logging_dir=str(tmp_path)) for name in ("a", "b")]
    reporter.add(specs[1], TaskLife("running"), 0, 3)
    assert not reporter.prepare_tracking(specs)
    for spec in specs:
        reporter.track(spec, 0)
    for loss, name in ((2.5, "a"), (3.5, "b")):
        reporter.step(name, StepResult(1, 3, loss, 1.0, 0.1, 8, "running"), 1.0)
    reporter.close()
    for loss, name in ((2.5, "a"), (3.5, "b")):
        assert f"1,loss,{loss}\n" in (tmp_path / name / "metrics.csv").read_text()


@pytest.mark.parametrize("saving", [False, True])
def test_a_full_disk_is_a_problem_to_tell_and_no_more(tmp_path: Path, saving: bool) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").symlink_to("/dev/full")
    reporter = reporter_of(tmp_path if saving else None, tmp_path / "board")
    if not saving:
        assert reporter._events is not None
        reporter._events._records._writer = open("/dev/full", "wb")  # noqa: SIM115
    reporter.evaluation("a", 0, EvalResult({"loss": 4.5, "accuracy": 0.5}, 2))
    flag = f"--save {tmp_path}" if saving else f"--tensorboard-dir {tmp_path / 'board'}"
    assert reporter.problem.startswith(f"{flag}: could not write") and "No space left" in reporter.problem
    assert reporter.problem.endswith("with --load." if saving else "another directory.")
    reporter.evaluation("a", 1, EvalResult({"loss": 4.5, "accuracy": 0.5}, 2))
    with pytest.raises(UserError, match="No space left"):
        reporter.close()
    reporter.release()


def test_a_disk_that_complains_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def close(self: EventFile) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    reporter = reporter_of(None, tmp_path / "board")
    monkeypatch.setattr(EventFile, "close", close)
    with pytest.raises(UserError, match=r"--tensorboard-dir .*: could not write: Disk quota"):
        reporter.close()


def test_a_place_where_tensorboards_file_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "board").write_text("in the way")
    with pytest.raises(UserError, match=r"--tensorboard-dir .*board: File exists"):
        reporter_of(None, tmp_path / "board")


def test_metrics_beyond_the_save_are_cut(tmp_path: Path) -> None:
    manifest = Manifest(1, "backbone", [SavedTask("a", 2, "running", "", "a/checkpoint-2", {}, "data")], {})
    path = tmp_path / "a" / "metrics.jsonl"
    path.parent.mkdir()
    lines = [{"step": 0, "eval_loss": 1.0}, *({"step": i, "wall_s": 100.0 * i} for i in (1, 2, 3))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    reporter = reporter_of(tmp_path)
    reporter.continue_metrics(tmp_path, manifest)
    reporter.step("a", StepResult(3, 3, 2.5, 1.5, 0.25, 8, "finished"), 0.5)
    reporter.close()
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in written] == [0, 1, 2, 3]
    assert 200 <= written[-1]["wall_s"] < 210, "the clock goes on from the last line that stayed"


def test_a_resumed_task_shows_its_figures_of_before(tmp_path: Path) -> None:
    manifest = Manifest(1, "backbone", [SavedTask("a", 2, "finished", "", "a/checkpoint-2", {}, "data")], {})
    (tmp_path / "a").mkdir()
    lines = [{"step": 0, "eval_loss": 9.0}, {"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}]
    lines.append({"step": 2, "eval_loss": 3.0})
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reporter = reporter_of(tmp_path)
    reporter.continue_metrics(tmp_path, manifest)
    task = reporter.history["a"]
    assert (task.first_loss, task.loss) == (5.0, 4.0)
    assert task.before is not None and task.after is not None
    assert (task.before.loss, task.after.loss) == (9.0, 3.0)
    reporter.step("a", StepResult(3, 4, 2.5, 1.5, 0.25, 8, "running"), 0.5)
    assert (task.first_loss, task.loss) == (5.0, 2.5)
    reporter.close()


def test_a_step_of_many_tasks_does_not_draw_the_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[float] = []
    draw = TaskTable.__rich_console__

    def counted(self: TaskTable, *options: Any) -> Any:
        draws.append(time.monotonic())
        return draw(self, *options)

    screen = io.StringIO()
    monkeypatch.setattr(TaskTable, "__rich_console__", counted)
    monkeypatch.setattr(
        module,
        "make_console",
        lambda **options: Console(force_terminal=True, force_interactive=True, file=screen),
    )
    reporter = Reporter(None, None, 1, live=True, silent=False)
    names = [f"task-{number}" for number in range(500)]
    for name in names:
        reporter.add(spec_of(name), TaskLife("running"), 0, 3)
    began = time.monotonic()
    for step in range(1, 4):
        for name in names:
            reporter.step(name, StepResult(step, 3, 2.5, 1.0, 0.1, 8, "running"), 1.0)
    lasted = time.monotonic() - began
    assert len([moment for moment in draws if moment >= began]) <= 2 + 3 * lasted, "of 1,500 steps"
    reporter.close()
    assert "task-499" in screen.getvalue()


def test_few_files_of_many_tasks_are_open_at_once(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, None, 1, live=False, silent=False)
    names = [f"task{i}" for i in range(200)]
    for name in names:
        reporter.add(spec_of(name), TaskLife("running"), 0, 2)
    before = len(os.listdir("/proc/self/fd"))
    for step in (1, 2):
        for name in names:
            reporter.step(name, StepResult(step, 2, 2.5, 1.0, 0.1, 8, "running"), 1.0)
    assert len(os.listdir("/proc/self/fd")) - before <= 70
    reporter.release()
    for name in names:
        lines = map(strict, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines] == [1, 2]
