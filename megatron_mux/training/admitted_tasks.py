"""The tasks of a run that have been admitted, or wait for it: which train, which are held, which have left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_mux import checkpoint
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.data.dataset import DataFiles
from megatron_mux.engine import Engine, StepResult, Task
from megatron_mux.errors import UserError
from megatron_mux.report import Reporter
from megatron_mux.runtime import Parallel
from megatron_mux.tasks.life import TaskLives
from megatron_mux.training.admission import Admission
from megatron_mux.training.callback import Callback, save_run
from megatron_mux.training.resumed import is_over


@dataclass
class AdmittedTasks:
    """Admits tasks to the engine as memory allows, each from its checkpoint if it has one, and knows all of them.

    Attributes:
        engine: Trains the tasks that are admitted.
        parallel: Where this rank stands.
        reporter: Told who joins, waits and leaves.
        info: The backbone, for tasks that join.
        files: Opens the data of tasks that join.
        callbacks: Told who joins and leaves; they save the run before tasks leave.
        continued: Directory of the run that this one continues, if any.
        entries: Every task the run has had, as it is now.
        saved: The same tasks, each as it was when its state was last saved. Values are replaced, not changed.
        accepted: Called once, when the first tasks are known to be those that the continued run had.
        save_directory: Where the run saves; None: it does not.
        saves_together: Whether each save is of all tasks, so that a resume has all of them at one moment.
        held: Names of tasks that stay pruned if they were when the continued run was saved; others train.
        intervals: The `Callback.intervals` of each task that was registered with the engine.
        lives: The state of every task of this run.
        keeps_pauses: Whether tasks that were paused when the continued run was saved still are; else they train.
    """

    engine: Engine
    parallel: Parallel
    reporter: Reporter
    info: BackboneInfo
    files: DataFiles
    callbacks: list[Callback]
    continued: Path | None = None
    entries: dict[str, SavedTask] = field(default_factory=dict)
    saved: dict[str, SavedTask] = field(default_factory=dict)
    accepted: Callable[[], None] | None = None
    save_directory: Path | None = None
    saves_together: bool = False
    held: Collection[str] = ()
    intervals: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lives: TaskLives = field(default_factory=TaskLives)
    keeps_pauses: bool = False
    _admission: Admission = field(init=False)
    _paused: dict[str, Task] = field(default_factory=dict)  # those that the engine does not have

    def __post_init__(self) -> None:
        self._admission = Admission(self.engine, self.parallel)

    def continue_from(self, manifest: Manifest, directory: Path, save: Path | None) -> None:
        """Take over the entries of the run that this one continues.

        Args:
            manifest: The save to continue from.
            directory: Where that run was saved.
            save: Where this run saves.
        """
        for entry in manifest.tasks:
            if directory != save:
                # Until this run saves to its own directory, its entries name the old run's checkpoints.
                theirs = [
                    path and str((directory / path).resolve())
                    for path in (entry.checkpoint, entry.good, entry.best.checkpoint)
                ]
                best = replace(entry.best, checkpoint=theirs[2])
                entry = replace(entry, checkpoint=theirs[0], good=theirs[1], best=best)
            self.entries[entry.name], self.saved[entry.name] = entry, copy.deepcopy(entry)

    def register(self, tasks: Sequence[Task]) -> None:
        """Admit tasks as memory allows, each from its checkpoint if the continued run saved one; others wait.

        Raises:
            UserError: A checkpoint is unreadable, or a task does not fit.
        """
        self.parallel.heartbeat.at("registering tasks", long=True)
        joining: list[Task] = []
        for task in tasks:
            name = task.spec.name
            entry = self.entries.get(name)
            task.life = self.lives.get(name) or self.lives.begin(name, "loading")
            if entry is not None and is_over(task, entry):
                task.life.to("failed" if entry.status == "failed" else "finished", entry.reason)
                self.reporter.add(task.spec, task.life, entry.step, entry.step)
                self.reporter.say(f"{name} is {entry.status} already in the run that is continued")
                continue
            if entry is not None and entry.checkpoint:
                task.resume = partial(checkpoint.load_task, self.continued or Path(), replace(entry))
            if entry is not None and entry.status in ("paused", "pruned"):
                if name in self.held if entry.status == "pruned" else self.keeps_pauses:
                    self._keep_paused(task, entry)
                    continue
                self.reporter.say(f"{name} trains again: it was {entry.status} when the run was saved")
            joining.append(task)
        accepted, self.accepted = self.accepted, None
        if accepted is not None:
            accepted()
        waited = [task.spec.name for task in self._admission.waiting]
        # Those that trained when the run was saved come before those that waited.
        admitted = self._admission.offer(sorted(joining, key=lambda task: task.resume is None))
        for task in admitted:
            if task.spec.name in waited:  # a mistake in the new tasks must not stop it
                self._admit_waiting(task)
        self._admit([task for task in admitted if task.spec.name not in waited])
        for task in self._admission.waiting:
            name = task.spec.name
            life = self.lives[name]
            if life.state != "waiting":
                life.to("waiting")
                self.reporter.add(task.spec, life, 0, task.spec.total_steps(len(task.data)))
                self.reporter.say(f"{name} waits until there is room for it in memory")

    def _keep_paused(self, task: Task, entry: SavedTask) -> None:
        """Hold a task that was paused or pruned when the continued run was saved."""
        life = self.lives[entry.name]
        if entry.status == "pruned":
            life.to("pruned", entry.reason)
        else:
            life.to("waiting")
            life.to("paused")
        self._paused[entry.name] = task
        self.reporter.add(task.spec, life, entry.step, task.spec.total_steps(len(task.data)))
        self.reporter.say(f"{entry.name} is {life.state}, as it was when the run was saved")

    def _admit(self, tasks: Sequence[Task]) -> None:
        """Register tasks with the engine.

        New ones are evaluated before their first step unless others train, whom that would hold up.
        """
        alone = not self.engine.active
        waited = {name for name, life in self.lives.items() if life.state == "waiting"}
        self.engine.register_tasks(tasks)
        fresh_tasks: list[str] = []
        for task in tasks:
            name = task.spec.name
            step, total, status = self.engine.progress(name)
            fresh = SavedTask(name, step, status, "", "", task.spec.plain(), task.data.fingerprint)
            fresh.reference = task.reference_fingerprint()
            entry = self.entries.setdefault(name, fresh)
            entry.spec, entry.data, entry.lengths = fresh.spec, fresh.data, task.lengths
            saved = self.saved.get(name) or copy.deepcopy(entry)
            self.saved[name] = replace(saved, spec=entry.spec, lengths=entry.lengths)
            if name in waited:
                self.reporter.say(f"{name} trains from here on")
            self.reporter.add(task.spec, self.lives[name], step, total)
            if status == "running":
                self.reporter.track(task.spec, step)
            self.intervals[name] = tuple(n for callback in self.callbacks for n in callback.intervals(name))
            if alone and step == 0 and task.resume is None:
                fresh_tasks.append(name)
        for callback in self.callbacks if fresh_tasks else ():
            callback.before_first_step(fresh_tasks)

    def _admit_waiting(self, task: Task) -> None:
        """Have a task train that has waited; a mistake in it stops only that task."""
        name = task.spec.name
        if name in self.engine.tasks:  # it was paused meanwhile
            self.engine.resume(name)
            self.reporter.add(task.spec, self.lives[name], *self.engine.progress(name)[:2])
            self.reporter.say(f"{name} trains from here on")
            return
        try:
            self._admit([task])
        except UserError as error:  # the same on every rank
            self.lives[name].end("refused", str(error))
            self.reporter.say(f"{name} refused: {error}")

    @property
    def waiting(self) -> bool:
        """Whether some task waits for memory."""
        return bool(self._admission.waiting)

    @property
    def paused(self) -> list[str]:
        """Tasks that are paused."""
        return [name for name, life in self.lives.items() if life.state == "paused"]

    def admit(self) -> None:
        """Admit waiting tasks that fit by now."""
        for task in self._admission.next() if self.waiting else ():
            self._admit_waiting(task)

    def note(self, name: str, result: StepResult) -> None:
        """Keep what a step of a task says of its adapter."""
        entry = self.entries[name]
        if result.diverged:
            entry.health.good = False
        elif result.status != "failed":
            entry.note(result.step, result.loss)

    def update_entries(self) -> None:
        """Have entries say what the lives of their tasks say."""
        for name, entry in self.entries.items():
            if name in self.lives:
                entry.follow(self.lives[name])

    def stop(self) -> None:
        """End the lives of tasks that are not done: the run stops."""
        for life in self.lives.values():
            if life.state != "pruned":
                life.end("stopped")

    def save(self, names: Collection[str], leaving: Sequence[str] = ()) -> None:
        """Save tasks, or all of them where the run `saves_together`; see `save_run`. Every rank calls it."""
        save_run(self.callbacks, None if self.saves_together else names, leaving)
