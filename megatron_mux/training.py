"""The loop: compose backbone, tasks and engine; step; evaluate, save and report; until every task is done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from megatron_mux import checkpoint
from megatron_mux.admission import Admission
from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.model import load_stages
from megatron_mux.backbone.registry import BackboneInfo, read_backbone_info
from megatron_mux.checkpoint import Manifest, SavedTask, TaskState
from megatron_mux.data.tokenizer import load_tokenizer
from megatron_mux.engine import Engine, StepResult, Task
from megatron_mux.engine.together import first_problem, raise_together
from megatron_mux.errors import SharedError, UserError
from megatron_mux.fusion.plan import Plan
from megatron_mux.pipeline.action import TimedAction
from megatron_mux.preparation import joinable, prepare, prepare_planning, watched, with_saved
from megatron_mux.report import Reporter, cut_metrics
from megatron_mux.runtime import Parallel, initialize
from megatron_mux.tasks import load_task_file
from megatron_mux.turns import Turns
from megatron_mux.watch import WatchedDirectory

_IDLE_SECONDS = 0.5


def run(arguments: MuxArguments) -> None:
    """Fine-tune the tasks that `arguments` name.

    It joins the world of processes; leaving it (`runtime.shutdown`) is for the caller, who first tells what was wrong.

    Raises:
        UserError: The input is wrong: everything that can be checked is, before a weight is read.
    """
    leader = os.environ.get("RANK", "0") == "0"
    save, resume = arguments.save, arguments.load
    if save is not None and save != resume:
        checkpoint.refuse_used(save)
    specs = load_task_file(arguments.mux_tasks, data_later=True) if arguments.mux_tasks is not None else []
    info = read_backbone_info(arguments.backbone)
    arguments.check_shape(info.shape)
    info.check_parallel(arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size)
    tokenizer = load_tokenizer(arguments.backbone)
    reporter = Reporter(
        save,
        arguments.tensorboard_dir,
        arguments.log_interval,
        not arguments.mux_no_progress,
        silent=not leader,
    )
    try:
        manifest = checkpoint.load(resume, info.fingerprint, reporter.say) if resume is not None else None
        if resume is not None and manifest is None:
            reporter.say(f"--load {resume}: no checkpoint there yet, starting anew")
        specs = with_saved(specs, manifest)
        resumed = [entry.name for entry in manifest.tasks if entry.checkpoint] if manifest is not None else []
        tasks = prepare(specs, info, tokenizer, reporter.say, resumed)
        parallel = initialize(
            arguments.tensor_model_parallel_size,
            arguments.pipeline_model_parallel_size,
            arguments.sequence_parallel,
            arguments.seed,
            timeout_minutes=arguments.distributed_timeout_minutes,
        )
        arguments.check_device(parallel.device.type)
        with watched(parallel, arguments, reporter.release) as parallel:
            planning = prepare_planning(arguments, info, tasks, parallel, manifest, reporter.say)
            reporter.say(f"reading the backbone {arguments.backbone}")
            parallel.presence.at("reading the backbone", long=True)
            stages = load_stages(
                arguments.backbone,
                parallel,
                arguments.dtype,
                arguments.recompute_granularity or "none",
                planning.split,
                arguments.mux_backbone_weights,
            )
            engine = Engine(stages, parallel, planning)
            loop = Loop(arguments, engine, parallel, reporter, info, tokenizer, manifest)
            loop.register(tasks)
            with _stop_on_signals(loop):
                loop.run()
        reporter.close()
    finally:
        reporter.release()


@dataclass
class Loop:
    """Steps the engine and does what is due between steps.

    Attributes:
        arguments: What the user asked for.
        engine: Trains.
        parallel: Where this rank stands.
        reporter: Tells.
        info, tokenizer: For tasks that join later.
        manifest: The save to continue from, if any.
        stopping: Set by a signal: leave after the step.
    """

    arguments: MuxArguments
    engine: Engine
    parallel: Parallel
    reporter: Reporter
    info: BackboneInfo
    tokenizer: Any
    manifest: Manifest | None = None
    stopping: bool = False
    _entries: dict[str, SavedTask] = field(default_factory=dict)
    _turns: Turns = field(init=False)
    _admission: Admission = field(init=False)
    _plan: Plan | None = None
    _files: dict[Path, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._admission = Admission(self.engine, self.parallel)
        self._turns = Turns(self.arguments.mux_rolling, self.arguments.mux_watch is not None)
        directory = self.arguments.load
        if directory is None:
            return
        if directory == self.arguments.save and self.parallel.rank == 0:
            cut_metrics(directory, self.manifest)
        if self.manifest is None:
            return
        for entry in self.manifest.tasks:
            if directory != self.arguments.save:
                # A run continued into another directory goes on naming the old one's checkpoints until it saves.
                theirs = [
                    path and str((directory / path).resolve()) for path in (entry.checkpoint, entry.good)
                ]
                entry = replace(entry, checkpoint=theirs[0], good=theirs[1])
            self._entries[entry.name] = entry
        self.reporter.say(f"continuing from {directory} (save {self.manifest.number})")
        before, now = self.manifest.plan, self.engine
        split = tuple(before.get("split", ()))
        same = (before["policy"], before["stages"]) == (now.planning.policy, now.planning.stages)
        if not same or (split and split != tuple(now.planning.split)):
            self.reporter.say(
                f"it was saved with policy {before['policy']} on {before['stages']} stage(s): going on with "
                f"{now.planning.policy} on {now.planning.stages} rounds differently"
            )

    def register(self, tasks: Sequence[Task]) -> None:
        """Take tasks in as memory allows, each from its checkpoint if the continued run has one; others wait.

        Raises:
            UserError: A checkpoint is unreadable, or a task does not fit.
        """
        self.parallel.presence.at("taking tasks in", long=True)
        joining: list[Task] = []
        for task in tasks:
            name, kind = task.spec.name, task.spec.adapter.peft_type
            entry = self._entries.get(name)
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
                task.resume = checkpoint.load_task(self.arguments.load or Path(), entry)
            joining.append(task)
        # Those that trained when the run was saved come before those that waited.
        self._take_in(self._admission.offer(sorted(joining, key=lambda task: task.resume is None)))
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
            self._entries.setdefault(name, fresh).status = status
            if name in self.reporter.history:  # it waited
                self.reporter.history[name].status = status
                self.reporter.say(f"{name} trains from here on")
            self.reporter.add(name, kind, step, total, status)
            if step == 0 and task.resume is None:
                self._evaluate(name)

    def _take_in_later(self, task: Task) -> None:
        """Register a task that has waited; a mistake in it stops nobody."""
        try:
            self._take_in([task])
        except UserError as error:  # the same on every rank: it depends on the task and the backbone alone
            self.reporter.history[task.spec.name].status = "refused"
            self.reporter.say(f"{task.spec.name} refused: {error}")

    def run(self) -> None:
        """Until every task is done; with a watched directory, until it holds a file named STOP as well."""
        watched = WatchedDirectory(self.arguments.mux_watch) if self.arguments.mux_watch is not None else None
        while not self._agreed_to_stop():
            self.parallel.presence.at("beginning the next steps")
            stop_when_done = True
            if watched is not None:
                stop_when_done = self._follow(watched)
            for task in self._admission.next():
                self._take_in_later(task)
            if not self.engine.active:
                if stop_when_done:
                    break
                time.sleep(_IDLE_SECONDS)
                continue
            self._advance()
        else:
            saved = "nothing" if self.arguments.save is None else "where every task stands"
            self.reporter.say(f"stopping: {saved} is saved")
        if self._turns.steps or self.manifest is None:
            self._save()
            self._draw()
        raise_together(self.reporter.problem, self.parallel)

    def _advance(self) -> None:
        """Take steps until something is due, then do it."""
        steps = self._turns.take(self.engine.steps, self._due())
        self.parallel.presence.at("reporting")
        if self._turns.is_time_to_draw:
            self._draw()
        self._plan = self.engine.last_plan or self._plan
        while self.engine.planning.news:
            self.reporter.say(self.engine.planning.news.pop(0))
        last: dict[str, StepResult] = {}
        for results in steps:
            for name, result in results.items():
                self._note(name, result)
                self.reporter.step(name, result, self._turns.seconds)
            last |= results
        # Every task's turn, whatever is due already.
        due = [self._after(name, result) for name, result in last.items()]
        if any(due):
            self._save()
        for name, result in last.items():
            if result.status == "failed":
                self._tell_what_is_kept(name)
            if result.status != "running":
                self.engine.remove_task(name)

    def _due(self) -> Iterator[int]:
        """In how many steps each task is to be evaluated and saved."""
        for name in self.engine.active:
            step, spec = self.engine.progress(name)[0], self.engine.task(name).spec
            for interval in (self.arguments.save_interval, spec.eval and spec.eval.eval_steps):
                if interval:
                    yield interval - step % interval

    def _after(self, name: str, result: StepResult) -> bool:
        """Evaluate if due; whether a save is due."""
        if result.status == "failed":
            return True
        spec = self.engine.task(name).spec
        finished = result.status == "finished"
        if spec.eval is not None and (finished or result.step % spec.eval.eval_steps == 0):
            self._evaluate(name)
        interval = self.arguments.save_interval
        return finished or bool(interval and result.step % interval == 0)

    def _note(self, name: str, result: StepResult) -> None:
        entry = self._entries[name]
        entry.status, entry.reason = result.status, result.reason
        if result.diverged:
            entry.health.good = False
        elif result.status != "failed":
            entry.note(result.step, result.loss)

    def _tell_what_is_kept(self, name: str) -> None:
        entry = self._entries[name]
        if self.arguments.save is None:
            return
        if entry.checkpoint == entry.good:
            what = "its last good adapter is kept"
        elif entry.health.good:  # it lacks data: nothing is known against what it had learned
            what = "its last adapter is kept"
        else:
            what = "its adapter before the failing step is kept (no earlier save is known to be good)"
        self.reporter.say(f"{name}: {what}: {self.arguments.save / entry.checkpoint}")

    def _evaluate(self, name: str) -> None:
        self.parallel.presence.at(f"evaluating {name}")
        try:
            result = self.engine.evaluate(name)
        except UserError as error:  # on every rank
            self.reporter.say(f"{name} could not be evaluated: {error}")
            return
        if result is not None:
            self.reporter.evaluation(name, self.engine.progress(name)[0], result)

    def _save(self, leaving: Sequence[str] = ()) -> None:
        """One manifest for all tasks, so that a resume continues them from the same moment."""
        directory = self.arguments.save
        if directory is None:
            return
        self.parallel.presence.at("saving")
        states: list[TaskState] = []
        for name, entry in self._entries.items():
            state = TaskState(entry)
            if name in self.engine.tasks:
                step, _, status = self.engine.progress(name)
                entry.status = "removed" if name in leaving else status
                if status == "failed" and not entry.health.good and entry.good:
                    entry.fall_back()  # what made its loss diverge is in the updates since
                elif not (entry.checkpoint and entry.step == step):
                    state.snapshot = self.engine.snapshot(name)
                    state.config = self.engine.adapter_config(name)
                    state.config["base_model_name_or_path"] = str(self.arguments.backbone.resolve())
                    entry.step = step
            states.append(state)
        problems: list[str | None] = [None]
        if self.parallel.rank == 0:
            try:
                # What a continued run goes on with; once nobody is left, what was run last.
                plan = self.engine.plan if self.engine.active else self._plan or self.engine.plan
                checkpoint.save(
                    directory, states, plan, self.info.fingerprint, self.arguments.mux_keep_checkpoints
                )
            except UserError as error:
                problems = [str(error)]
        if self.parallel.world_size > 1:
            written = [[state.entry.checkpoint for state in states]]
            dist.broadcast_object_list(problems, src=0)
            dist.broadcast_object_list(written, src=0)
            for state, path in zip(states, written[0], strict=True):
                state.entry.checkpoint = path
        if problems[0] is not None:
            raise SharedError(problems[0])

    def _draw(self) -> None:
        """Leave a picture of the last timed step, on the pipeline of the first data-parallel replica."""
        stages: list[list[TimedAction]] = [self._turns.timed]
        if self.parallel.world_size > 1:
            stages = [[] for _ in range(self.parallel.world_size)]
            mine = self._turns.timed if self.parallel.tp_rank == 0 and self.parallel.dp_rank == 0 else []
            dist.all_gather_object(stages, mine)
        everything = [action for stage in stages for action in stage]
        first, last = self._turns.pictured
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        title = f"{self.engine.planning.policy}, {self.engine.planning.stages} stage(s): {steps} as measured"
        self.reporter.schedule(everything, title, self.parallel.pp_size)

    def _follow(self, watched: WatchedDirectory) -> bool:
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
                self._save(leaving=names)
            for name in names:
                self._entries[name].status = "removed"
                self.engine.remove_task(name)
                self.reporter.history[name].status = "removed"
                self.reporter.say(f"{name} left: {path.name} was taken out of {watched.directory}")
        for path in changes.added:
            self._join(path)
        return changes.stop

    def _join(self, path: Path) -> None:
        """Take in a task file; a mistake in it is reported and stops nobody."""
        self.parallel.presence.at(f"taking in {path.name}", long=True)
        tasks: list[Task] = []
        problem = ""
        try:
            if path in self._files:
                raise UserError("changed while its tasks run: give a changed task a new name and file")
            specs = load_task_file(path, data_later=True)
            waiting = [task.spec.name for task in self._admission.waiting]
            joinable(specs, self._entries, self.engine.tasks, waiting, self.manifest is not None)
            tasks = prepare(specs, self.info, self.tokenizer, self.reporter.say)
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
        if problem:
            self.reporter.say(f"{path.name} refused: {problem}")
            return
        self._files[path] = [task.spec.name for task in tasks]
        for task in tasks:
            if task.spec.name in self.engine.tasks:
                self.reporter.say(f"{task.spec.name} joined from {path.name}")

    def _agreed_to_stop(self) -> bool:
        """Whether any rank was told to stop: signals do not reach all ranks between the same two steps."""
        raise_together(self.reporter.problem, self.parallel)
        # Steps are as long as on the slowest rank, and every rank takes equally many.
        stopping, self._turns.seconds = self.parallel.most([float(self.stopping), self._turns.seconds])
        return stopping > 0


@contextmanager
def _stop_on_signals(loop: Loop) -> Iterator[None]:
    """SIGTERM and SIGINT let the step finish, save and leave: what a preempting scheduler and a person want."""

    def stop(number: int, frame: FrameType | None) -> None:
        loop.stopping = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
