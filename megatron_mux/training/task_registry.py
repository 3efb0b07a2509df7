"""The tasks of a run: who trains, who waits for room, who has left; they come by file or by a watched directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_mux import checkpoint
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.engine import Engine, Task
from megatron_mux.engine.agreement import first_problem
from megatron_mux.errors import UserError
from megatron_mux.report import Reporter
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import load_task_file
from megatron_mux.training.admission import Admission
from megatron_mux.training.task_setup import check_joining, open_tasks
from megatron_mux.training.watched_directory import WatchedDirectory


@dataclass
class TaskRegistry:
    """Takes tasks in and lets them go.

    Attributes:
        engine: Trains them.
        parallel: Where this rank stands.
        reporter: Tells.
        info, tokenizer: For tasks that join later.
        evaluate: Evaluates a task by name.
        save: Saves the run; told who is leaving.
        continued: The directory of the run that is continued, if any.
        entries: Every task that the run has had, as a save names it.
    """

    engine: Engine
    parallel: Parallel
    reporter: Reporter
    info: BackboneInfo
    tokenizer: Any
    evaluate: Callable[[str], None]
    save: Callable[[Sequence[str]], None]
    continued: Path | None = None
    entries: dict[str, SavedTask] = field(default_factory=dict)
    _admission: Admission = field(init=False)
    _files: dict[Path, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._admission = Admission(self.engine, self.parallel)

    def continue_from(self, manifest: Manifest, directory: Path, save: Path | None) -> None:
        """Take over what the run that is continued knew of its tasks.

        Args:
            manifest: Its save.
            directory: Where that is.
            save: Where this run saves.
        """
        for entry in manifest.tasks:
            if directory != save:
                # A run continued into another directory goes on naming the old one's checkpoints until it saves.
                theirs = [
                    path and str((directory / path).resolve()) for path in (entry.checkpoint, entry.good)
                ]
                entry = replace(entry, checkpoint=theirs[0], good=theirs[1])
            self.entries[entry.name] = entry

    def register(self, tasks: Sequence[Task]) -> None:
        """Take tasks in as memory allows, each from its checkpoint if the continued run has one; others wait.

        Raises:
            UserError: A checkpoint is unreadable, or a task does not fit.
        """
        self.parallel.heartbeat.at("taking tasks in", long=True)
        joining: list[Task] = []
        for task in tasks:
            name, kind = task.spec.name, task.spec.adapter.peft_type
            entry = self.entries.get(name)
            if entry is not None and entry.status in ("finished", "failed"):
                self.reporter.add(name, kind, entry.step, entry.step, entry.status)
                self.reporter.say(f"{name} is {entry.status} already in the run that is continued")
                continue
            if entry is not None and entry.data != task.data.fingerprint:
                raise UserError(
                    f"task {name!r}: {task.data.path} is not what it was when the run was saved: restore it, or give "
                    "the task a new name"
                )
            if entry is not None and entry.checkpoint:
                task.resume = checkpoint.load_task(self.continued or Path(), entry)
            joining.append(task)
        before = [task.spec.name for task in self._admission.waiting]
        # Those that trained when the run was saved come before those that waited.
        admitted = self._admission.offer(sorted(joining, key=lambda task: task.resume is None))
        for task in admitted:
            if task.spec.name in before:  # what is wrong with others is nothing to it
                self._take_in_later(task)
        self._take_in([task for task in admitted if task.spec.name not in before])
        for task in self._admission.waiting:
            name, kind = task.spec.name, task.spec.adapter.peft_type
            if name not in self.reporter.history:
                self.reporter.add(name, kind, 0, task.spec.total_steps(len(task.data)), "waiting")
                self.reporter.say(f"{name} waits until there is room for it in memory")

    def _take_in(self, joining: Sequence[Task]) -> None:
        """Register tasks that there is room for."""
        self.engine.register_tasks(joining)
        for task in joining:
            name, kind = task.spec.name, task.spec.adapter.peft_type
            step, total, status = self.engine.progress(name)
            fresh = SavedTask(name, step, status, "", "", task.spec.plain(), task.data.fingerprint)
            self.entries.setdefault(name, fresh).status = status
            if name in self.reporter.history:  # it waited
                self.reporter.history[name].status = status
                self.reporter.say(f"{name} trains from here on")
            self.reporter.add(name, kind, step, total, status)
            if step == 0 and task.resume is None:
                self.evaluate(name)

    def _take_in_later(self, task: Task) -> None:
        """Register a task that has waited; a mistake in it stops nobody."""
        try:
            self._take_in([task])
        except UserError as error:  # the same on every rank: it depends on the task and the backbone alone
            self.reporter.history[task.spec.name].status = "refused"
            self.reporter.say(f"{task.spec.name} refused: {error}")

    @property
    def waiting(self) -> bool:
        """Whether some task waits for room."""
        return bool(self._admission.waiting)

    def admit(self) -> None:
        """Take in those that wait and that there is room for now."""
        for task in self._admission.next():
            self._take_in_later(task)

    def follow(self, watched: WatchedDirectory) -> bool:
        """Let tasks of a watched directory join and leave; whether the run may end once its tasks are done."""
        changes = watched.look()
        for path in changes.removed:
            named = self._files.pop(path, [])
            names = [name for name in named if name in self.engine.tasks]
            for name in named:
                if self._admission.withdraw(name):
                    self.reporter.history[name].status = "removed"
                    self.reporter.say(f"{name} left before there was room for it")
            if names:
                self.save(names)
            for name in names:
                self.entries[name].status = "removed"
                self.engine.remove_task(name)
                self.reporter.history[name].status = "removed"
                self.reporter.say(f"{name} left: {path.name} was taken out of {watched.directory}")
        for path in changes.added:
            self._join(path)
        return changes.stop

    def _join(self, path: Path) -> None:
        """Take in a task file; a mistake in it is reported and stops nobody."""
        self.parallel.heartbeat.at(f"taking in {path.name}", long=True)
        tasks: list[Task] = []
        problem = ""
        try:
            if path in self._files:
                raise UserError("changed while its tasks run: give a changed task a new name and file")
            specs = load_task_file(path, data_later=True)
            waiting = [task.spec.name for task in self._admission.waiting]
            check_joining(specs, self.entries, self.engine.tasks, waiting, self.continued is not None)
            tasks = open_tasks(specs, self.info, self.tokenizer, self.reporter.say)
            for task in tasks:
                self.engine.check_alone(task)
        except UserError as error:
            problem = str(error)
        problem = first_problem(problem, self.parallel)
        if not problem:
            try:
                self.register(tasks)
            except (
                UserError
            ) as error:  # the same on every rank: it depends on the file and the backbone alone
                problem = str(error)
                for task in tasks:
                    self._admission.withdraw(task.spec.name)
        if problem:
            self.reporter.say(f"{path.name} refused: {problem}")
            return
        self._files[path] = [task.spec.name for task in tasks]
        for task in tasks:
            if task.spec.name in self.engine.tasks:
                self.reporter.say(f"{task.spec.name} joined from {path.name}")
