"""Reports of a run: live progress, metrics files, TensorBoard, pictures of the schedule, a closing table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from rich.live import Live

from megatron_mux.checkpoint import Manifest
from megatron_mux.console import make_console
from megatron_mux.engine import EvalResult, StepResult
from megatron_mux.engine.evaluation.lines import eval_lines
from megatron_mux.errors import UserError
from megatron_mux.files import prepare_directory, write_atomically
from megatron_mux.library_log import set_display
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.pipeline.draw import to_svg
from megatron_mux.pipeline.trace import to_trace
from megatron_mux.saved_files import DECISIONS
from megatron_mux.task_table import TaskTable
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import TaskLife
from megatron_mux.trackers.registry import Trackers
from megatron_mux.trackers.tensorboard import EventFile
from megatron_mux.trackers.tracker import TrackedRun

EXPERT_ACCESS = "expert_access.jsonl"
"""Which experts the steps between two lines selected, and which have moved."""

SAMPLES = "samples.jsonl"
"""What a task generates on some held-out prompts, evaluation by evaluation."""

_OPEN_FILES = 64
"""Files of metrics that are open at once: every task has some, and descriptors are few."""

_REFRESHES = 2
"""How often the live table is drawn, each second."""


class Reporter:
    """Reports how the tasks are doing, to people and to files; silent on all ranks but 0.

    Args:
        directory: The run's directory, or None to leave no files.
        tensorboard: Directory for TensorBoard, or None.
        log_interval: A task's own steps between its printed lines; files get every step.
        live: Draw a live table where the output is a terminal; else a line per task and interval.
        silent: Print and write nothing (ranks other than 0).
        owner: The one task of the run, if other runs share the directory: pictures go to the task's directory.

    Attributes:
        at_end: What `close` prints below the closing table.
        sweep_of: The sweeps of tasks that are configurations of one.
        swept: See `TaskTable`.
    """

    def __init__(
        self,
        directory: Path | None,
        tensorboard: Path | None,
        log_interval: int,
        live: bool,
        silent: bool,
        owner: str = "",
    ) -> None:
        self.owner = owner
        self.directory = None if silent else directory
        self.log_interval = log_interval
        self.silent = silent
        self.console = make_console(quiet=silent, soft_wrap=True, highlight=False)
        self._table = TaskTable()
        self.history = self._table.tasks
        self.at_end: list[Any] = []
        self.sweep_of: Mapping[str, str] = {}
        self.swept = self._table.swept
        self.problem = ""
        self._files: dict[str, IO[str]] = {}
        self._earlier: dict[str, tuple[list[float], list[EvalResult]]] = {}
        self._trackers: dict[str, Trackers] = {}
        self._events = None if tensorboard is None or silent else EventFile(tensorboard)
        self._live: Live | None = None
        if live and not silent and self.console.is_interactive:
            self._live = Live(
                self._table, console=self.console, refresh_per_second=_REFRESHES, redirect_stderr=False
            )
            self._live.start()
            set_display(self._live)
        self._started = time.monotonic()

    def continue_metrics(self, directory: Path, manifest: Manifest | None) -> None:
        """Go on with the metrics of the run in `directory`, cut to `manifest`; `wall_s` goes on from the last one."""
        if seconds := cut_metrics(directory, manifest, self.owner):
            self._started = time.monotonic() - seconds
        for entry in manifest.tasks if manifest is not None and not self.silent else ():
            self._earlier[entry.name] = _losses(directory / entry.name / "metrics.jsonl")
            if entry.name in self.history:
                self._recall(entry.name)

    def _recall(self, name: str) -> None:
        """Give a task's row the figures of before the run was resumed."""
        task, (losses, evaluations) = self.history[name], self._earlier.pop(name)
        if losses and task.first_loss is None:
            task.first_loss, task.loss = losses[0], losses[-1]
        if evaluations and task.before is None:
            task.before, task.after = evaluations[0], evaluations[-1]

    def add(self, spec: TaskSpec, life: TaskLife, step: int = 0, total_steps: int | None = None) -> None:
        """Add a task's row to the table, or bring it up to date."""
        self._table.add(spec, life, step, total_steps)
        if spec.name in self._earlier:
            self._recall(spec.name)

    def track(self, spec: TaskSpec, step: int) -> None:
        """Report a task's figures to the trackers that it names, from `step` on."""
        training = spec.training
        directory = _own_directory(spec, self.directory)
        if self.silent or not training.report_to or spec.name in self._trackers:
            return
        if directory is None:
            names = ", ".join(training.report_to)
            self.say(f"{spec.name}: nothing is reported to {names} without --save or logging_dir")
            return
        run = TrackedRun(
            spec.name,
            training.run_name or spec.name,
            training.project,
            directory,
            step=step,
            config=spec.plain(),
            group=self.sweep_of.get(spec.name, ""),
        )
        self._trackers[spec.name] = Trackers(training.report_to, run, self.say)

    def prepare_tracking(self, specs: Sequence[TaskSpec]) -> str:
        """Make the directories of tasks' trackers and try to write there; returns the problem, if any."""
        for spec in specs:
            directory = _own_directory(spec, None)
            if directory is None or not spec.training.report_to or self.silent:
                continue
            if problem := prepare_directory(directory, f"task {spec.name!r}: training.logging_dir"):
                return problem
        return ""

    def untrack(self, name: str) -> None:
        """End a task's runs in its trackers."""
        if name in self._trackers:
            self._trackers.pop(name).close(self.history[name].life.state == "finished")

    def step(self, name: str, result: StepResult, seconds: float) -> None:
        """Report a task's step.

        Args:
            name: The task.
            result: What the step gave.
            seconds: How long the engine's step took, on average over the steps that ran without a flush between them.
                Their results are known together; `wall_s` says when.
        """
        task = self.history[name]
        task.step = result.step
        if result.status != "failed":
            task.first_loss = result.loss if task.first_loss is None else task.first_loss
            task.loss, task.learning_rate = result.loss, result.learning_rate
        self._table.count(name, result.tokens, seconds)
        due = result.step % self.log_interval == 0 or result.status != "running"
        if result.status != "failed":
            line: dict[str, float | int] = {
                "step": result.step,
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm,
                "tokens": result.tokens,
                "wall_s": round(time.monotonic() - self._started, 3),
            }
            balance = ""
            if result.router_aux_loss is not None:
                line["router_aux_loss"] = result.router_aux_loss
                balance = f" router aux loss {result.router_aux_loss:.4f}"
            self._metrics(name, line | dict(result.metrics))
            if due and self._live is None:
                self.say(
                    f"{name}: step {result.step}/{result.total_steps} loss {result.loss:.4f}{balance} "
                    f"lr {result.learning_rate:.2e} |g| {result.grad_norm:.3f} {result.tokens / seconds:.0f} tokens/s"
                )
        if result.reason:
            self.say(f"{name} stopped: {result.reason}", style="bold red")

    def evaluation(self, name: str, step: int, result: EvalResult) -> None:
        """Report an evaluation after `step` of the task's steps."""
        task = self.history[name]
        task.before = task.before or result
        task.after = result
        self._metrics(name, {"step": step, **{f"eval_{key}": value for key, value in result.values.items()}})
        if self._live is None:
            for line in eval_lines(name, step, result):
                self.say(line)
        for sample in result.samples:
            self.append(f"{name}/{SAMPLES}", {"step": step, **asdict(sample)})

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line as it is: names that users chose may look like markup."""
        self.console.print(text, markup=False, style=style)

    def stopped(self, why: str, advice: str) -> None:
        """Report why the run stops; `advice` is how to continue."""
        self.say(f"stopped {why}: {advice}")

    def schedule(
        self, actions: Sequence[TimedAction], title: str, ranks: int, plan: Mapping[str, Any] | None = None
    ) -> None:
        """Write `schedule.svg` and `schedule.json`.

        Args:
            actions: What was timed on the ranks of a pipeline.
            title: Heading of the picture.
            ranks: Number of these ranks.
            plan: What the actions followed.
        """
        if self.directory is None or not actions:
            return
        try:
            directory = self.directory / self.owner
            write_atomically(directory / "schedule.svg", to_svg(actions, title, ranks=ranks))
            write_atomically(directory / "schedule.json", to_trace(actions, ranks, plan))
        except OSError as error:  # a picture is not worth a run
            self.say(f"could not draw the schedule in {self.directory}: {error.strerror or error}")

    def close(self) -> None:
        """End the live table and print the closing one.

        Raises:
            UserError: What was written last did not reach its file.
        """
        is_drawn = self._live is not None
        self._stop_display()
        if self.history and not is_drawn:
            self.console.print(self._table)
        for own in self.at_end:
            self.console.print(own, markup=False)
        if self.directory is not None and self.history:
            self.say(f"adapters: {self.directory / (self.owner or 'TASK') / 'checkpoint-STEP'}")
        self.release()
        if self.problem:
            raise UserError(self.problem)

    def release(self) -> None:
        """Close files; nothing more is said. A file that cannot be closed is a `problem`."""
        self._stop_display()
        while self._files:
            _, file = self._files.popitem()
            try:
                file.close()
            except OSError as error:  # it still holds what it could not write before
                self.note(f"--save {self.directory}: could not write metrics", error)
        if self._events is not None:
            self._close_events(self._events)
        for name in list(self._trackers):
            self.untrack(name)

    def _metrics(self, name: str, line: dict[str, float | int]) -> None:
        if self._events is not None:
            values = {f"{name}/{key}": value for key, value in line.items() if key not in ("step", "wall_s")}
            try:
                self._events.write(int(line["step"]), values)
            except OSError as error:
                self.note(f"--tensorboard-dir {self._events.directory}: could not write", error)
                self._close_events(self._events)
        if name in self._trackers:
            figures = {key: float(value) for key, value in line.items() if key not in ("step", "wall_s")}
            self._trackers[name].log(int(line["step"]), figures)
        self.append(f"{name}/metrics.jsonl", {key: _or_null(value) for key, value in line.items()})

    def append(self, file: str, line: Mapping[str, Any]) -> None:
        """Add a line to a file of the run's directory."""
        if self.directory is None:
            return
        try:
            if file not in self._files:
                path = self.directory / file
                path.parent.mkdir(parents=True, exist_ok=True)
                if len(self._files) >= _OPEN_FILES:
                    self._files.pop(next(iter(self._files))).close()
                self._files[file] = open(path, "a")  # noqa: SIM115 (kept open for the next line)
            self._files[file].write(json.dumps(line) + "\n")
            self._files[file].flush()
        except OSError as error:
            self.note(f"--save {self.directory}: could not write metrics", error)

    def _close_events(self, events: EventFile) -> None:
        self._events = None
        try:
            events.close()
        except OSError as error:
            self.note(f"--tensorboard-dir {events.directory}: could not write", error)

    def note(self, what: str, error: OSError) -> None:
        """Keep the first problem; the loop raises it on every rank, since only this one knows of it."""
        advice = "Make room or choose another directory"
        if self.directory is not None:
            advice += ", and go on with --load"
        self.problem = self.problem or f"{what}: {error.strerror or error}. {advice}."

    def _stop_display(self) -> None:
        self._table.is_final = True
        if self._live is not None:
            # Of a run that is refused at the start, only the reason stays on the terminal.
            self._live.transient = all(task.life.state == "loading" for task in self.history.values())
            self._live.stop()
            self._live = None


def _losses(path: Path) -> tuple[list[float], list[EvalResult]]:
    """Training losses and evaluations in a metrics file."""
    losses, evaluations = list[float](), list[EvalResult]()
    with suppress(OSError, ValueError):
        for line in map(json.loads, path.read_text().splitlines()):
            if "loss" in line:
                losses.append(line["loss"])
            elif "eval_loss" in line:
                values = {key.removeprefix("eval_"): value for key, value in line.items() if key != "step"}
                evaluations.append(EvalResult(values, 0))
    return losses, evaluations


def cut_metrics(directory: Path, manifest: Manifest | None, owner: str = "") -> float:
    """Drop the metrics lines beyond what was saved, so that a continued run writes each step once.

    Args:
        directory: The run's directory.
        manifest: What it continues from; None when it was killed before its first save.
        owner: The one task of the run, if other runs share the directory.

    Returns:
        The last `wall_s` of the lines that stay; 0 without any.
    """
    seconds = 0.0
    entries = manifest.tasks if manifest is not None else []
    # A failed task is not run again: what it wrote after its last good checkpoint stays.
    saved = {entry.name: float("inf") if entry.status == "failed" else entry.step for entry in entries}
    decisions = {entry.name: entry.configuration.decisions for entry in entries}
    files = ("metrics.jsonl", SAMPLES)
    own = [path for name in files for path in directory.glob(f"{owner or '*'}/{name}")]
    for path in (*own, *directory.glob(EXPERT_ACCESS), *directory.glob(DECISIONS)):
        try:
            lines = path.read_text().splitlines()
            if path.name == DECISIONS:
                kept = [line for line in lines if _is_decided(line, decisions)]
            elif path.name == EXPERT_ACCESS:
                kept = [line for line in lines if _all_saved(line, saved)]
            else:
                kept = [line for line in lines if _number(line, "step") <= saved.get(path.parent.name, -1)]
                seconds = max([seconds, *(_number(line, "wall_s", 0.0) for line in kept)])
            if len(kept) != len(lines):
                write_atomically(path, "".join(line + "\n" for line in kept))
        except OSError as error:
            raise UserError(f"{path}: cannot be cut to what was saved: {error.strerror or error}") from error
    return seconds


def _own_directory(spec: TaskSpec, run: Path | None) -> Path | None:
    """A task's directory in its `logging_dir`, else in the run's directory: files of its trackers have fixed names."""
    root = spec.training.logging_dir or run
    return None if root is None else root / spec.name


def _all_saved(line: str, saved: Mapping[str, float]) -> bool:
    """Whether the steps of all tasks of a line of `expert_access.jsonl` are saved."""
    try:
        return all(step <= saved.get(name, -1) for name, step in json.loads(line)["steps"].items())
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        return False


def _is_decided(line: str, decisions: Mapping[str, int]) -> bool:
    """Whether a save has the decision of a line of `sweep.jsonl`."""
    try:
        return bool(json.loads(line)["number"] <= decisions[json.loads(line)["task"]])
    except (json.JSONDecodeError, KeyError, TypeError):
        return False


def _number(line: str, key: str, missing: float = math.inf) -> float:
    """A figure of a metrics line; `missing` without it, as in a line that a kill left unfinished."""
    try:
        return float(json.loads(line)[key])
    except (json.JSONDecodeError, KeyError, TypeError):
        return missing


def _or_null(value: float) -> float | None:
    """A number as JSON can hold it: it knows neither NaN nor infinity."""
    return value if math.isfinite(value) else None
