"""When tasks are saved, and what of them.

A task's steps do not depend on its neighbours, so a save writes the tasks that it is due for, and its manifest names
the last checkpoints of the others: a resume continues each from its own.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_mux.checkpoint import TaskToSave, checkpoint_of
from megatron_mux.engine import StepResult
from megatron_mux.hub_cache import model_id
from megatron_mux.saved_files import BEST
from megatron_mux.training.best import is_best
from megatron_mux.training.callback import Callback
from megatron_mux.training.saving import Saver
from megatron_mux.training.step_loop import StepLoop
from megatron_mux.training.task_registry import TaskRegistry


@dataclass(eq=False)
class SaveSchedule(Callback):
    """Asks for saves of tasks at intervals, after an improvement, and when they are done.

    Attributes:
        registry: The tasks of the run.
        interval: Steps of a task between saves; None: as tasks ask for.
    """

    registry: TaskRegistry
    interval: int | None

    def intervals(self, name: str) -> Iterable[int]:
        """Yield the intervals, in steps, at which a task is saved."""
        task = self.registry.engine.task(name)
        epoch = math.ceil(len(task.data) / task.spec.sequences_per_step)
        own = task.spec.training.save_interval(self.registry.engine.progress(name)[1], epoch)
        return filter(None, (self.interval, own))

    def tasks_to_save(self, last: dict[str, StepResult]) -> Collection[str]:
        """Those of which a save is due."""
        return [name for name, result in last.items() if self._is_due(name, result)]

    def _is_due(self, name: str, result: StepResult) -> bool:
        training = self.registry.engine.task(name).spec.training
        improved = training.keeps_best and is_best(self.registry.entries[name], result.step)
        at_interval = any(result.step % interval == 0 for interval in self.intervals(name))
        return result.status != "running" or improved or at_interval


@dataclass(eq=False)
class Saves(Callback):
    """Has the states of tasks written, and tells what is kept of them.

    Attributes:
        registry: The tasks of the run.
        saver: Writes while steps run.
        backbone: Directory of the backbone, which an adapter's configuration names.
        step_loop: Counts the steps of this run.
        steps_before: Steps of the run that this one continues.
    """

    registry: TaskRegistry
    saver: Saver
    backbone: Path
    step_loop: StepLoop
    steps_before: int

    def save(self, names: Collection[str] | None, leaving: Sequence[str]) -> None:
        """Copy the states of the tasks; writing them goes on while steps run."""
        engine, saved = self.registry.engine, self.registry.saved
        self.registry.update_entries()
        # Tasks that train here and were saved elsewhere: a resume from here is not to need the other directory.
        elsewhere = {name for name in engine.tasks if os.path.isabs(saved[name].checkpoint)}
        states, moved = [], []
        for name, entry in self.registry.entries.items():
            state = TaskToSave(entry)
            if names is None or name in names or name in elsewhere:
                if self._update_entry(state, leaving):
                    moved.append(name)
                saved[name] = copy.deepcopy(entry)
            else:
                saved[name] = replace(saved[name], status=entry.status, reason=entry.reason)
            states.append(replace(state, entry=saved[name]))
        copies = engine.copy_states(moved, self.saver.memory)
        plan = None
        if engine.parallel.rank == 0:
            # The plan a resume starts with; once no task is left, the last one.
            plan = engine.plan if engine.active else engine.last_plan or engine.plan
        self.saver.begin(states, copies, plan, self.steps_before + self.step_loop.steps)

    def _update_entry(self, state: TaskToSave, leaving: Sequence[str]) -> bool:
        """Bring a task's entry up to date; whether its state has to be written."""
        engine, entry, name = self.registry.engine, state.entry, state.entry.name
        if name in leaving:
            entry.status = "removed"
        if name not in engine.tasks:
            return False
        task, (step, _, status) = engine.task(name), engine.progress(name)
        is_moved = False
        if status == "failed" and not entry.health.good and entry.good:
            entry.fall_back()  # the updates since then made its loss diverge
        elif os.path.isabs(entry.checkpoint) or not (entry.checkpoint and entry.step == step):
            is_moved = True
            entry.step, entry.checkpoint = step, checkpoint_of(name, step)
            state.config = engine.adapter_config(name)
            state.records = len(task.data)
            if task.evaluation is not None:
                state.held_out = len(task.evaluation), task.evaluation.fingerprint
            state.config["base_model_name_or_path"] = model_id(self.backbone)
        state.limit = task.spec.training.save_total_limit
        if task.spec.training.keeps_best and is_best(entry, entry.step):
            entry.best.checkpoint = entry.checkpoint
        return is_moved

    def task_done(self, name: str, result: StepResult) -> None:
        """Say which adapter is kept of a failed task, and where the best one is."""
        entry, say = self.registry.entries[name], self.registry.reporter.say
        if result.status == "failed":
            self.saver.wait()  # only what is complete is named
            if entry.checkpoint == entry.good:
                what = "its last good adapter is kept"
            elif entry.health.good:  # it ran out of memory, which says nothing against its adapter
                what = "its last adapter is kept"
            else:
                what = "its adapter before the failing step is kept (no earlier save is known to be good)"
            say(f"{name}: {what}: {self.saver.directory / entry.checkpoint}")
        if entry.best.checkpoint:
            path = self.saver.directory / name / BEST
            say(f"{name}: its best adapter is that of step {entry.best.step}: {path}")
