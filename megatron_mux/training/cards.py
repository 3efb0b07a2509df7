"""Model cards of a run's adapters, made while a save is written, from what the run has reported so far."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from megatron_mux.checkpoint import TaskToSave
from megatron_mux.model_card import Parent, TaskCard, TrainingRecord, base_model_name
from megatron_mux.runtime import Parallel


@dataclass
class _Followed:
    """What has been read of a task's `metrics.jsonl`: so many bytes of it, and what its lines amount to."""

    position: int = 0
    record: TrainingRecord = field(default_factory=TrainingRecord)

    def follow(self, path: Path, step: int) -> None:
        """Read on, up to the lines of a step; those of later steps are left for a later save."""
        try:
            size = path.stat().st_size
        except OSError:
            return  # nothing was reported yet
        if size < self.position:  # the task has begun anew
            self.position, self.record = 0, TrainingRecord()
        with path.open("rb") as file:
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is still being written
                try:
                    values = json.loads(line)
                    if values["step"] > step:
                        return
                    self.record.add(values)
                except (ValueError, KeyError, TypeError):
                    pass  # somebody edited the file: no reason to lose a save
                self.position += len(line)


class CardWriter:
    """Makes the cards of a run's tasks.

    Args:
        directory: The run's.
        backbone: Fingerprint of the backbone.
        parallel: How the run is divided.
        precision: In what it computes.
        quantised: How the backbone's weights are quantised; empty: not at all.
    """

    def __init__(
        self, directory: Path, backbone: str, parallel: Parallel, precision: str, quantised: str = ""
    ) -> None:
        self.directory = directory
        self.backbone = backbone
        self.precision = precision
        self.quantised = quantised
        self.layout = {
            "tensor": parallel.tp_size,
            "pipeline": parallel.pp_size,
            "data": parallel.dp_size,
            "expert": parallel.experts.size,
        }
        self._tasks: dict[str, _Followed] = {}

    def card(self, state: TaskToSave) -> str:
        """The card of a task's checkpoint; reads what the run has added to the task's metrics since the last one."""
        entry = state.entry
        followed = self._tasks.setdefault(entry.name, _Followed())
        followed.follow(self.directory / entry.name / "metrics.jsonl", entry.step)
        name = base_model_name(state.config.get("base_model_name_or_path"))
        return TaskCard(
            entry.name,
            Parent(name, self.backbone),
            entry.step,
            entry.spec,
            entry.data,
            state.records,
            self.layout,
            self.precision,
            followed.record,
            state.held_out,
            self.quantised,
        ).text()
