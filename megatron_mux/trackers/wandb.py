"""Weights & Biases: a run for each task; `WANDB_MODE=offline` keeps it on disk."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from megatron_mux.trackers.tracker import TrackedRun, Tracker


class WandbTracker(Tracker):
    """A run of its own beside those of other tasks in the same process."""

    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        run.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            group=run.group or None,
            id=run.known,
            resume="allow" if run.known else None,
            dir=str(run.directory),
            config=dict(run.config),
            reinit="create_new",
        )
        self.known = str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        """See `Tracker.close`."""
        self._run.finish(exit_code=0 if finished else 1)
