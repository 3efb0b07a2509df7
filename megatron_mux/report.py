"""What a run tells: live progress, metrics files, TensorBoard, pictures of the schedule, a closing table."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from megatron_mux.checkpoint import Manifest, write_atomically
from megatron_mux.engine import EvalResult, StepResult
from megatron_mux.errors import UserError
from megatron_mux.pipeline.draw import to_svg, to_trace
from megatron_mux.pipeline.execute import TimedAction

# Columns of a table that goes into a file or a pipe.
_FILE_WIDTH = 140
_HEADINGS = (
    "task",
    "adapter",
    "step",
    "loss first -> last",
    "eval loss",
    "eval accuracy",
    "tokens/s",
    "status",
)


@dataclass
class TaskHistory:
    """What the closing table needs of one task."""

    kind: str
    total_steps: int
    step: int = 0
    first_loss: float | None = None
    loss: float | None = None
    learning_rate: float = 0.0
    before: EvalResult | None = None
    after: EvalResult | None = None
    tokens: int = 0
    seconds: float = 0.0
    status: str = "running"
    reason: str = ""


class Reporter:
    """Tells people and files how the tasks are doing. Only rank 0 has one that speaks.

    Args:
        directory: The run's directory, or None to leave no files.
        tensorboard: Directory for TensorBoard, or None.
        log_interval: A task's own steps between its printed lines; files get every step.
        live: Draw a live table where the output is a terminal; else a line per task and interval.
        silent: Say and write nothing (ranks other than 0).
    """

    def __init__(
        self, directory: Path | None, tensorboard: Path | None, log_interval: int, live: bool, silent: bool
    ) -> None:
        self.directory = None if silent else directory
        self.log_interval = log_interval
        self.silent = silent
        self.console = Console(quiet=silent, soft_wrap=True, highlight=False)
        if not self.console.is_terminal:
            self.console = Console(quiet=silent, soft_wrap=True, highlight=False, width=_FILE_WIDTH)
        self.history: dict[str, TaskHistory] = {}
        self.problem = ""
        self._files: dict[str, IO[str]] = {}
        self._writer: Any = None
        if tensorboard is not None and not silent:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self._writer = SummaryWriter(str(tensorboard))
            except OSError as error:
                raise UserError(f"--tensorboard-dir {tensorboard}: {error.strerror or error}") from error
        self._live: Live | None = None
        if live and not silent and self.console.is_terminal:
            self._live = Live(self._table(), console=self.console, refresh_per_second=4)
            self._live.start()
        self._started = time.monotonic()

    def add(self, name: str, kind: str, step: int, total_steps: int, status: str = "running") -> None:
        """A task joined, or was done before this run continued it."""
        self.history.setdefault(name, TaskHistory(kind, total_steps, step, status=status))
        self._refresh()

    def step(self, name: str, result: StepResult, seconds: float) -> None:
        """A task's step was done, in `seconds` of the engine's step."""
        task = self.history[name]
        task.step, task.status, task.reason = result.step, result.status, result.reason
        if result.status != "failed":
            task.first_loss = result.loss if task.first_loss is None else task.first_loss
            task.loss, task.learning_rate = result.loss, result.learning_rate
        task.tokens += result.tokens
        task.seconds += seconds
        due = result.step % self.log_interval == 0 or result.status != "running"
        if result.status != "failed":
            line = {
                "step": result.step,
                "loss": result.loss,
                "learning_rate": result.learning_rate,
                "grad_norm": result.grad_norm,
                "tokens": result.tokens,
                "wall_s": round(time.monotonic() - self._started, 3),
            }
            self._metrics(name, line)
            if due and self._live is None:
                self.say(
                    f"{name}: step {result.step}/{result.total_steps} loss {result.loss:.4f} "
                    f"lr {result.learning_rate:.2e} |g| {result.grad_norm:.3f} {result.tokens / seconds:.0f} tokens/s"
                )
        if result.reason:
            self.say(f"{name} stopped: {result.reason}", style="bold red")
        self._refresh()

    def evaluation(self, name: str, step: int, result: EvalResult) -> None:
        """A task was evaluated after `step` of its steps."""
        task = self.history[name]
        task.before = task.before or result
        task.after = result
        self._metrics(name, {"step": step, "eval_loss": result.loss, "eval_accuracy": result.accuracy})
        if self._live is None:
            self.say(f"{name}: step {step} eval loss {result.loss:.4f} accuracy {result.accuracy:.1%}")
        self._refresh()

    def say(self, text: str, style: str | None = None) -> None:
        """A line for people, as it is: what users wrote may look like markup."""
        self.console.print(text, markup=False, style=style)

    def schedule(self, actions: Sequence[TimedAction], title: str) -> None:
        """Leave `schedule.svg` and `schedule.json` of the actions that were timed."""
        if self.directory is None or not actions:
            return
        try:
            write_atomically(self.directory / "schedule.svg", to_svg(actions, title))
            write_atomically(self.directory / "schedule.json", to_trace(actions))
        except OSError as error:  # a picture is not worth a run
            self.say(f"could not draw the schedule in {self.directory}: {error.strerror or error}")

    def close(self) -> None:
        """End the live picture and print the closing table."""
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()
        elif self.history:
            self.console.print(self._table())
        self.release()

    def release(self) -> None:
        """Close files; nothing more is said."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _metrics(self, name: str, line: dict[str, float | int]) -> None:
        if self._writer is not None:
            for key, value in line.items():
                if key not in ("step", "wall_s"):
                    self._writer.add_scalar(f"{name}/{key}", value, line["step"])
        if self.directory is None:
            return
        try:
            if name not in self._files:
                path = self.directory / name / "metrics.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[name] = open(path, "a")  # noqa: SIM115 (kept open for the run)
            self._files[name].write(json.dumps(line) + "\n")
            self._files[name].flush()
        except OSError as error:
            # Raised by the loop, on all ranks at once: only this one knows.
            self.problem = (
                f"--save {self.directory}: could not write metrics: {error.strerror or error}. Make room or choose "
                "another directory, and go on with --load."
            )

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table())

    def _table(self) -> Table:
        table = Table(title="megatron-mux", title_justify="left")
        for heading in _HEADINGS:
            words = heading in ("task", "adapter", "status")
            table.add_column(heading, justify="left" if words else "right", no_wrap=heading != "task")
        for name, task in self.history.items():
            speed = f"{task.tokens / task.seconds:.0f}" if task.seconds else "-"
            table.add_row(
                name,
                task.kind,
                f"{task.step}/{task.total_steps}",
                _change(task.first_loss, task.loss, "{:.3f}"),
                _change(_of(task.before, "loss"), _of(task.after, "loss"), "{:.3f}"),
                _change(_of(task.before, "accuracy"), _of(task.after, "accuracy"), "{:.1%}"),
                speed,
                task.status,
            )
        return table


def cut_metrics(directory: Path, manifest: Manifest | None) -> None:
    """Drop the metrics lines beyond what was saved, so that a continued run writes each step once.

    Args:
        directory: The run's directory.
        manifest: What it continues from; None when it was killed before its first save.
    """
    entries = manifest.tasks if manifest is not None else []
    # A failed task is not run again: what it wrote after its last good checkpoint stays.
    saved = {entry.name: float("inf") if entry.status == "failed" else entry.step for entry in entries}
    for path in directory.glob("*/metrics.jsonl"):
        try:
            lines = path.read_text().splitlines()
            kept = [line for line in lines if _step_of(line) <= saved.get(path.parent.name, -1)]
            if len(kept) != len(lines):
                write_atomically(path, "".join(line + "\n" for line in kept))
        except OSError as error:
            raise UserError(f"{path}: cannot be cut to what was saved: {error.strerror or error}") from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")  # a line that a kill left unfinished


def _of(result: EvalResult | None, field: str) -> float | None:
    return None if result is None else float(getattr(result, field))


def _change(first: float | None, last: float | None, form: str) -> str:
    if first is None or last is None:
        return "-"
    return f"{form.format(first)} -> {form.format(last)}"
