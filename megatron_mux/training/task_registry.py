"""Follows commands: which tasks join a run, pause, go on, stop and leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_mux import checkpoint
from megatron_mux.data.dataset import DataFiles
from megatron_mux.dry_run.process import end_worker
from megatron_mux.engine import Task
from megatron_mux.engine.agreement import first_problem
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.life import TaskLife
from megatron_mux.training.admitted_tasks import AdmittedTasks
from megatron_mux.training.best import check_best_is_saved
from megatron_mux.training.commands import Add, Cancel, Command, Drain, Pause, Prune, Resume, Submit, Tell
from megatron_mux.training.joining import JoiningFile, JoiningFiles, read_joining
from megatron_mux.training.resumed import EDITS, changed
from megatron_mux.training.task_setup import check_joining, open_tasks


@dataclass
class TaskRegistry(AdmittedTasks):
    """The tasks of a run; lets them join, pause, stop and leave as commanded."""

    _joining: JoiningFiles = field(init=False)
    _names: dict[Path, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._joining = JoiningFiles(self.files, self.parallel, self._admission.prepare)

    @property
    def preparing(self) -> bool:
        """Whether this process prepares tasks that join: their data, or a prediction of their memory."""
        return bool(self._joining.queue) and self._joining.preparing

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
                case Submit(file, continues):
                    self._prepare(Path(file), continues)
                case Cancel(Path() as file):
                    self._cancel_file(file)
                case Cancel(str() as name):
                    self._cancel(name)
                case Pause(name):
                    self._pause(name)
                case Resume(name):
                    self._resume(name)
                case Prune(tasks):
                    self._prune(tasks)
                case Add(specs):
                    self._add(specs)
                case Tell(content):
                    for callback in self.callbacks:
                        callback.told(content)
                case Drain():
                    drains = True
        return drains and not self._joining.queue

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
            self.save([name])
        elif waiting is not None:
            self._paused[name] = waiting
            self.lives[name].to("paused")
        self.reporter.say(f"{name} is paused")

    def _resume(self, name: str) -> None:
        """Let a paused or pruned task train again, once there is room for it: a pruned one before those that wait."""
        if self._refuses(name, "resumed", lambda life: life.state in ("paused", "pruned")):
            return
        is_pruned = self.lives[name].state == "pruned"
        for callback in self.callbacks if is_pruned else ():
            callback.finish()  # its checkpoint may be being written
        self.lives[name].to("waiting")
        task = self._paused.pop(name, None) or self.engine.task(name)
        for admitted in self._admission.offer([task], first=is_pruned):
            self._admit_waiting(admitted)
        if self.lives[name].state == "waiting":
            self.reporter.say(f"{name} waits until there is room for it in memory")

    def _prune(self, reasons: Mapping[str, str]) -> None:
        """Let tasks stop and leave memory; they can go on from what is saved now."""
        training = [name for name in reasons if name in self.engine.tasks]
        for name, reason in reasons.items():
            if name in training:
                self.engine.pause(name, "pruned", reason)
            else:  # it was saved before it was decided about, and has not trained since
                self._paused[name] = self._admission.withdraw(name) or self._paused[name]
                self.lives[name].to("pruned", reason)
        self.save(list(reasons))
        for name in training:
            task = self._paused[name] = self.engine.task(name)
            saved = replace(self.entries[name])
            task.resume = partial(checkpoint.load_task, self.save_directory or Path(), saved)
            self.engine.remove_task(name)
            self.reporter.untrack(name)

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
            self.save(leaving, leaving)
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

    def _prepare(self, path: Path, continues: Path | None) -> None:
        """Read a task file and have it prepared; a mistake in it is reported and stops nobody."""
        self._forget(path)  # an older version of it
        specs, problem = [], ""
        try:
            if path in self._names:
                raise UserError("changed while its tasks run: give a changed task a new name and file")
            specs = read_joining(path)
            if continues is not None and len(specs) != 1:
                raise UserError(f"has {len(specs)} tasks: only one can continue {continues}")
            check_best_is_saved(specs, self.save_directory is not None)
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
        self._joining.add(path, specs, continues)
        for spec in specs:
            self.reporter.add(spec, self.lives.begin(spec.name, "joining"))

    def _add(self, specs: Sequence[TaskSpec]) -> None:
        """Admit tasks whose data are known."""
        for spec in specs:
            self.reporter.add(spec, self.lives.begin(spec.name, "joining"))
            self._open_and_register([spec], self.files, spec.name)

    def _join(self, file: JoiningFile, files: DataFiles) -> None:
        """Admit the tasks of a file that is prepared."""
        problem = "" if file.continues is None else self._continue(file.specs[0], file.continues)
        if problem:
            self._refuse(file.specs, file.path.name, problem)
            return
        names = self._names[file.path] = self._open_and_register(file.specs, files, file.path.name)
        if not names:
            del self._names[file.path]
        for name in names:
            if name in self.engine.tasks:
                self.reporter.say(f"{name} joined from {file.path.name}")

    def _continue(self, spec: TaskSpec, saved: Path) -> str:
        """Have a task that joins go on from what was last saved of another one; returns the problem, if any."""
        problem = ""
        try:
            for callback in self.callbacks:
                callback.finish()  # it may be being saved here
            manifest = checkpoint.load(saved.parent, self.engine.backbone.info.fingerprint, self.reporter.say)
            entries = manifest.tasks if manifest is not None else []
            entry = next((own for own in entries if own.name == saved.name), None)
            if manifest is None or entry is None:
                raise UserError(f"{saved}: no save there")
            if difference := changed(entry, spec):
                raise UserError(difference, EDITS)
            found = [replace(entry, name=spec.name, status=entry.status if entry.is_over else "running")]
            self.continue_from(replace(manifest, tasks=found), saved.parent, None)
        except UserError as error:
            problem = str(error)
        return first_problem(problem, self.parallel)

    def _open_and_register(self, specs: Sequence[TaskSpec], files: DataFiles, where: str) -> list[str]:
        """Open and admit tasks; a mistake in one is reported, refuses all of them, and stops nobody.

        Returns:
            The names of tasks that are admitted or wait.
        """
        self.parallel.heartbeat.at(f"registering the tasks of {where}", long=True)
        tasks: list[Task] = []
        problem = ""
        try:
            tasks = open_tasks(specs, self.info, files, self.reporter.say, self.entries)
            problem = self.reporter.prepare_tracking(specs)
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
            self._refuse(specs, where, problem)
            return []
        return [task.spec.name for task in tasks]

    def _refuse(self, specs: Sequence[TaskSpec], where: str, problem: str) -> None:
        """End the lives of tasks that cannot join."""
        self.reporter.say(f"{where} refused: {problem}")
        for spec in specs:
            self.lives[spec.name].end("refused", problem)
