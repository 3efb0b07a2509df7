"""MLflow: a run for each task in the experiment of its project; `MLFLOW_TRACKING_URI` says where."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any

from megatron_mux.trackers.tracker import TrackedRun, Tracker

_LONGEST_PARAMETER = 500


class MlflowTracker(Tracker):
    """A run through MLflow's client, which keeps no run of the process active: tasks do not meet.

    Without `MLFLOW_TRACKING_URI` it uses files in `mlruns` of the task's directory.
    """

    def __init__(self, run: TrackedRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        files = run.directory.resolve() / "mlruns"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            files.mkdir(parents=True, exist_ok=True)
            uri = files.as_uri()
        self._client: Any = mlflow.MlflowClient(uri)
        self._entities: Any = importlib.import_module("mlflow.entities")
        if run.known is not None:
            self.known = run.known
            self._client.set_terminated(run.known, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        number = (
            self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        )
        tags = {"sweep": run.group} if run.group else {}
        self.known = str(self._client.create_run(number, tags=tags, run_name=run.name).info.run_id)
        for section, fields in run.config.items():
            for key, value in fields.items() if isinstance(fields, dict) else ():
                self._client.log_param(self.known, f"{section}.{key}", str(value)[:_LONGEST_PARAMETER])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self.known, metrics=metrics)

    def close(self, finished: bool) -> None:
        """See `Tracker.close`."""
        self._client.set_terminated(self.known, "FINISHED" if finished else "KILLED")
