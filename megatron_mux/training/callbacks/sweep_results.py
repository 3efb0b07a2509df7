"""The results of sweeps: the leaderboard, `results.csv` and `curves.svg`, at the end and while a run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.files import write_atomically
from megatron_mux.saved_files import CURVES, RESULTS
from megatron_mux.sweep.leaderboard import Row, best_lines, ranked, table, to_csv
from megatron_mux.tasks.scheduler import SchedulerSpec
from megatron_mux.tasks.sweep import Settings, Sweep
from megatron_mux.training.task_registry import TaskRegistry

_SECONDS_BETWEEN_CURVES = 60.0
_LEAST_SHARE = 50
"""Curves take at most one in so many seconds of a run."""


@dataclass(eq=False)
class SweepResults:
    """Ranks configurations and writes what came of them.

    Attributes:
        registry: The tasks of the run.
        sweeps: By name; the samplers of a run add configurations to them.
        spec: Names the deciding figure.
        backbone: For the line of code that loads the best adapter.
        directory: Of the run; None: nothing is saved.
        check: Raises a `UserError` if another run took the directory over.
    """

    registry: TaskRegistry
    sweeps: Mapping[str, Sweep]
    spec: SchedulerSpec
    backbone: str
    directory: Path | None
    check: Callable[[], None]
    _draws_at: float = -math.inf

    def write(self, is_last: bool = False) -> None:
        """Write `results.csv`, and now and then `curves.svg`."""
        directory = self.registry.reporter.directory
        if directory is None:
            return
        self.check()
        rows = self._rows()
        try:
            write_atomically(directory / RESULTS, to_csv(rows, self._metric))
        except OSError as error:
            self.registry.reporter.note(f"--save {directory}: could not write the results of sweeps", error)
            return
        began = time.monotonic()
        if is_last or began >= self._draws_at:
            self._draw(directory, rows)
            taken = time.monotonic() - began
            self._draws_at = began + max(_SECONDS_BETWEEN_CURVES, _LEAST_SHARE * taken)

    def finish(self) -> None:
        """Write them for the last time, and have the leaderboard printed when the run ends."""
        with suppress(UserError):  # another run has taken the directory over
            self.write(is_last=True)
        reporter, metric = self.registry.reporter, self._metric
        for sweep, rows in self._rows().items():
            reporter.at_end.append(table(sweep, rows, metric))
            if metric != "loss":  # of one batch it names no best one
                reporter.at_end += best_lines(rows[0], metric, self.directory or Path(), self.backbone)
        if self.directory is not None:
            reporter.at_end.append(f"all of them: {self.directory / RESULTS}, {self.directory / CURVES}")

    @property
    def _metric(self) -> str:
        """The deciding figure as files name it; the training loss where nothing is evaluated."""
        evaluated = any(entry.configuration.evaluations for entry in self.registry.entries.values())
        return f"eval_{self.spec.figure}" if evaluated else "loss"

    def _rows(self) -> dict[str, list[Row]]:
        """The rows of each sweep, best first; of the training loss where nothing is evaluated."""
        metric = self._metric
        greater = self.spec.is_greater_better and metric != "loss"
        return {
            name: ranked([self._row(*own, metric) for own in sweep.configurations.items()], greater)
            for name, sweep in self.sweeps.items()
        }

    def _row(self, name: str, settings: Settings, metric: str) -> Row:
        entry, history = self.registry.entries.get(name), self.registry.reporter.history.get(name)
        if entry is None or history is None:
            life = self.registry.lives.get(name)  # one that could not even be read is in no table
            return Row(name, settings, None, 0, 0, *((life.state, life.reason) if life else ("waiting",)))
        at, value = history.step, history.loss
        if metric != "loss":
            at = max(entry.configuration.evaluations, default=0)
            value = entry.configuration.evaluations.get(at)
        outcome = (history.status, history.reason, entry.checkpoint)
        return Row(name, settings, value, at, history.step, *outcome)

    def _draw(self, directory: Path, rows: Mapping[str, Sequence[Row]]) -> None:
        """Write `curves.svg`; a picture is not worth a run."""
        try:
            from megatron_mux.sweep.curves import draw

            write_atomically(directory / CURVES, draw(directory, rows, self._metric))
        except Exception as error:
            self.registry.reporter.say(
                f"could not draw {directory / CURVES}: {type(error).__name__}: {error}"
            )
