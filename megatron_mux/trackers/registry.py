"""Every tracker by its name in `report_to`; none is imported before it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

from megatron_mux.files import write_atomically
from megatron_mux.trackers.tracker import TrackedRun, Tracker

PLACES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "wandb": ("megatron_mux.trackers.wandb", "WandbTracker", "wandb"),
        "mlflow": ("megatron_mux.trackers.mlflow", "MlflowTracker", "mlflow"),
        "tensorboard": ("megatron_mux.trackers.tensorboard", "TensorboardTracker", "tensorboard"),
        "csv": ("megatron_mux.trackers.csv_file", "CsvTracker", ""),
    }
)
"""Module, class, and the package that it needs (empty: none)."""
_KNOWN = "trackers.json"
"""In a task's directory: the trackers' own names of its run."""


def missing_package(name: str) -> str:
    """The package that a tracker needs and that is not installed; empty: there is none."""
    package = PLACES[name][2]
    return package if package and find_spec(package) is None else ""


class Trackers:
    """The trackers of one task; one that fails is left out from then on, and the run goes on."""

    def __init__(self, names: Sequence[str], run: TrackedRun, say: Callable[[str], None]) -> None:
        self._task, self._say = run.task, say
        self._open: dict[str, Tracker] = {}
        record = run.directory / _KNOWN
        known = _read(record) if run.step else {}
        for name in names:
            module, kind, _ = PLACES[name]
            try:
                make = getattr(import_module(module), kind)
                self._open[name] = make(replace(run, known=known.get(name)))
            except Exception as error:  # whatever a service or its package raises: the run is worth more
                self._fail(name, error)
        found = {name: tracker.known for name, tracker in self._open.items() if tracker.known is not None}
        if found:
            run.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(record, json.dumps(found) + "\n")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Report the figures of a step."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(step, values)
            except Exception as error:
                del self._open[name]
                self._fail(name, error)

    def close(self, finished: bool) -> None:
        """End the task's runs; see `Tracker.close`."""
        while self._open:
            name, tracker = self._open.popitem()
            try:
                tracker.close(finished)
            except Exception as error:
                self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        self._say(f"{self._task}: {name} takes no more figures: {type(error).__name__}: {error}")


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(own) for name, own in found.items()} if isinstance(found, dict) else {}
