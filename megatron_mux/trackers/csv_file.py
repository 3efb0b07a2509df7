"""A CSV file with a line for each figure: step, metric, value."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping

from megatron_mux.files import write_atomically
from megatron_mux.trackers.tracker import TrackedRun, Tracker

_NAME = "metrics.csv"
_HEADER = ("step", "metric", "value")


class CsvTracker(Tracker):
    """Appends to `metrics.csv`, flushed after every step."""

    def __init__(self, run: TrackedRun) -> None:
        self._path = path = run.directory / _NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines()[1:] if run.step and path.exists() else []
        kept = [line for line in lines if _step_of(line) <= run.step]
        write_atomically(path, "".join(f"{line}\n" for line in [",".join(_HEADER), *kept]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        with open(self._path, "a", newline="") as file:  # not kept open: every task may have one
            rows = ((step, name, repr(value)) for name, value in values.items())
            csv.writer(file, lineterminator="\n").writerows(rows)

    def close(self, finished: bool) -> None:
        """See `Tracker.close`."""


def _step_of(line: str) -> float:
    step = line.partition(",")[0]
    return int(step) if step.isdecimal() else math.inf
