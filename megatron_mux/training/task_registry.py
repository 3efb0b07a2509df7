"""The tasks of a run: which train, which are paused, which wait for memory, which are to join, which have left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_mux import checkpoint
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.data.dataset import DataFiles
from megatron_mux.dry_run.process import end_worker
from megatron_mux.engine import Engine, StepResult, Task
from megatron_mux.engine.agreement import first_problem
from megatron_mux.errors import UserError
from megatron_mux.report import Reporter
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import load_task_file
from megatron_mux.tasks.life import TaskLife, TaskLives
from megatron_mux.training.admission import Admission
from megatron_mux.training.best import check_best_is_saved
from megatron_mux.training.callback import Callback, save_run
from megatron_mux.training.commands import Cancel, Command, Drain, Pause, Resume, Submit
from megatron_mux.training.joining import JoiningFile, JoiningFiles
from megatron_mux.training.resumed import is_over
from megatron_mux.training.task_setup import check_joining, open_tasks


@dataclass
class TaskRegistry:
    """Admits tasks to the engine, queues those that do not fit, pauses some, and removes those that leave.

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
        saves: Whether the run saves anything.
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
    saves: bool = True
    intervals: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lives: TaskLives = field(default_factory=TaskLives)
    keeps_pauses: bool = False
    _admission: Admission = field(init=False)
    _joining: JoiningFiles = field(init=False)
    _names: dict[Path, list[str]] = field(default_factory=dict)
    _paused: dict[str, Task] = field(default_factory=dict)  # those that the engine does not have

    def __post_init__(self) -> None:
        self._admission = Admission(self.engine, self.parallel)
        self._joining = JoiningFiles(self.files, self.parallel, self._admission.prepare)

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
            if entry is not None and entry.status == "paused":
                if self.keeps_pauses:
                    self._keep_paused(task, entry)
                    continue
                self.reporter.say(f"{name} trains again: it was paused when the run was saved")
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
        """Hold a task that was paused when the continued run was saved."""
        life = self.lives[entry.name]
        life.to("waiting")
        life.to("paused")
        self._paused[entry.name] = task
        self.reporter.add(task.spec, life, entry.step, task.spec.total_steps(len(task.data)))
        self.reporter.say(f"{entry.name} is paused, as it was when the run was saved")

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
            entry.spec, entry.lengths = fresh.spec, task.lengths
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

    @property
    def preparing(self) -> bool:
        """Whether this process prepares tasks that join: their data, or a prediction of their memory."""
        return bool(self._joining.queue) and self._joining.preparing

    def admit(self) -> None:
        """Admit waiting tasks that fit by now."""
        for task in self._admission.next() if self.waiting else ():
            self._admit_waiting(task)

    def follow(self, commands: Iterable[Command], preparing: bool) -> bool:
        """Let tasks join and leave as commanded. Every rank calls it with the same commands.

        Args:
            commands: Since the last call.
            preparing: Whether any rank was still `preparing` when all of them last compared notes.

        Returns:
            Whether the run may end once its tasks are done.
        """
        if self._joining.queue:
            for line in self._joining.log_lines():
                self.reporter.say(line)
            if not preparing:
                self._join(*self._joining.take())
        drains = False
        for command in commands:
            match command:
                case Submit(file):
                    self._prepare(Path(file))
                case Cancel(Path() as file):
                    self._cancel_file(file)
                case Cancel(str() as name):
                    self._cancel(name)
                case Pause(name):
                    self._pause(name)
                case Resume(name):
                    self._resume(name)
                case Drain():
                    drains = True
        return drains and not self._joining.queue

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
            life.end("stopped")

    def close(self) -> None:
        """Cancel what is being prepared."""
        self._joining.close()
        end_worker()

    def _pause(self, name: str) -> None:
        """Let a task take no part in steps."""
        if self._refuses(name, "paused", lambda life: life.can_become("paused")):
            return
        waiting = self._admission.withdraw(name)
        if name in self.engine.tasks:
            self.engine.pause(name)
            save_run(self.callbacks, [name])
        elif waiting is not None:
            self._paused[name] = waiting
            self.lives[name].to("paused")
        self.reporter.say(f"{name} is paused")

    def _resume(self, name: str) -> None:
        """Let a paused task train again, once there is room for it."""
        if self._refuses(name, "resumed", lambda life: life.state == "paused"):
            return
        self.lives[name].to("waiting")
        task = self._paused.pop(name, None) or self.engine.task(name)
        for admitted in self._admission.offer([task]):
            self._admit_waiting(admitted)
        if self.lives[name].state == "waiting":
            self.reporter.say(f"{name} waits until there is room for it in memory")

    def _cancel(self, name: str) -> None:
        """Let a task leave."""
        if self._refuses(name, "cancelled", lambda life: not life.is_over):
            return
        if name in self._joining.names:
            self._joining.drop(name)
            self.lives[name].end("removed")
            self.reporter.say(f"{name} left before its data were tokenised")
        else:
            self._remove([name], "it was cancelled")

    def _refuses(self, name: str, done: str, possible: Callable[[TaskLife], bool]) -> bool:
        """Whether a command cannot be followed; then says why."""
        life = self.lives.get(name)
        if life is not None and possible(life):
            return False
        why = "this run has no task of that name"
        if life is not None:
            why = f"it is {life.state}" + (", not paused" if done == "resumed" else "")
        self.reporter.say(f"{name} cannot be {done}: {why}")
        return True

    def _cancel_file(self, path: Path) -> None:
        """Let the tasks of a file leave."""
        if self._forget(path):
            self.reporter.say(f"{path.name} left before its data were tokenised")
        self._remove(self._names.pop(path, []), f"{path.name} was taken out of {path.parent}")

    def _remove(self, names: Sequence[str], why: str) -> None:
        """Let tasks leave: those that train or are paused once the run is saved, those that wait at once."""
        leaving: list[str] = []
        for name in names:
            waiting = self._admission.withdraw(name)
            if name in self.engine.tasks or name in self._paused:
                leaving.append(name)
            elif waiting is not None:
                self.lives[name].end("removed")
                self.reporter.say(f"{name} left before there was room for it")
        if leaving:
            save_run(self.callbacks, leaving, leaving)
        for name in leaving:
            if self._paused.pop(name, None) is None:
                self.engine.remove_task(name)
            self.lives[name].end("removed")
            self.reporter.say(f"{name} left: {why}")

    def _forget(self, path: Path) -> bool:
        """Forget a file that is being prepared; returns whether there was one."""
        specs = self._joining.cancel(path)
        for spec in specs:
            self.lives[spec.name].end("removed")
        return bool(specs)

    def _prepare(self, path: Path) -> None:
        """Read a task file and have it prepared; a mistake in it is reported and stops nobody."""
        self._forget(path)  # an older version of it
        specs, problem = [], ""
        try:
            if path in self._names:
                raise UserError("changed while its tasks run: give a changed task a new name and file")
            specs = load_task_file(path, data_later=True)
            check_best_is_saved(specs, self.saves)
            self.update_entries()
            waiting = [*self._paused, *(task.spec.name for task in self._admission.waiting)]
            check_joining(
                specs,
                self.entries,
                [*self.engine.tasks, *self._paused],
                waiting + self._joining.names,
                self.continued is not None,
            )
        except UserError as error:
            problem = str(error)
        problem = first_problem(problem, self.parallel)
        if problem:
            self.reporter.say(f"{path.name} refused: {problem}")
            return
        self._joining.add(path, specs)
        for spec in specs:
            self.reporter.add(spec, self.lives.begin(spec.name, "joining"))

    def _join(self, file: JoiningFile, files: DataFiles) -> None:
        """Admit the tasks of a file that is prepared; a mistake in it is reported and stops nobody."""
        self.parallel.heartbeat.at(f"registering the tasks of {file.path.name}", long=True)
        tasks: list[Task] = []
        problem = ""
        try:
            tasks = open_tasks(file.specs, self.info, files, self.reporter.say, self.entries)
            problem = self.reporter.prepare_tracking(file.specs)
        except UserError as error:
            problem = str(error)
        problem = first_problem(problem, self.parallel)
        if not problem:
            try:
                for task in tasks:  # on every rank: the first may have to predict memory for all
                    self.engine.check_alone(task)
                self.register(tasks)
            except UserError as error:  # the same on every rank
                problem = str(error)
                for task in tasks:
                    self._admission.withdraw(task.spec.name)
                    self._paused.pop(task.spec.name, None)
        if problem:
            self.reporter.say(f"{file.path.name} refused: {problem}")
            for spec in file.specs:
                self.lives[spec.name].end("refused", problem)
            return
        self._names[file.path] = [task.spec.name for task in tasks]
        for task in tasks:
            if task.spec.name in self.engine.tasks:
                self.reporter.say(f"{task.spec.name} joined from {file.path.name}")
