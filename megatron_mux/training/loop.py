"""The loop: step the engine; evaluate, save and report what is due; until every task is done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field, replace
from functools import partial

from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, TaskToSave, checkpoint_of
from megatron_mux.data.dataset import DataFiles
from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.engine import Engine, Planning, StepResult
from megatron_mux.engine.agreement import everyones, raise_on_every_rank
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import Plan
from megatron_mux.hub_cache import model_id
from megatron_mux.report import Reporter
from megatron_mux.runtime import Parallel
from megatron_mux.training.best import BestCheckpointTracker
from megatron_mux.training.eval_setup import accuracy_measured
from megatron_mux.training.exits import Exits
from megatron_mux.training.expert_watch import ExpertWatch
from megatron_mux.training.garbage import freeze_objects, unfreeze_objects
from megatron_mux.training.joining import WatchedDirectory
from megatron_mux.training.saving import Saver
from megatron_mux.training.step_loop import Due, StepLoop
from megatron_mux.training.task_registry import TaskRegistry

_IDLE_SECONDS = 0.5


@dataclass
class Loop:
    """Steps the engine and does what is due between steps.

    Attributes:
        arguments: The command line.
        engine: Trains the tasks.
        parallel: This rank's place.
        registry: The tasks of the run.
        manifest: The save to continue from, if any.
        watch: Counts which experts steps select; None: nobody asked.
        lock: On the directory of `--save`; None on ranks that do not write there.
        began: When the run began, by `time.monotonic`.
        stopping: Set by a signal: save and leave after the current steps.
    """

    arguments: MuxArguments
    engine: Engine
    parallel: Parallel
    reporter: Reporter
    info: InitVar[BackboneInfo]
    files: InitVar[DataFiles]
    manifest: Manifest | None = None
    watch: ExpertWatch | None = None
    lock: DirectoryLock | None = None
    began: float = field(default_factory=time.monotonic)
    stopping: bool = False
    registry: TaskRegistry = field(init=False)
    _step_loop: StepLoop = field(init=False)
    _exits: Exits = field(init=False)
    _saver: Saver | None = None
    _plan: Plan | None = None
    _timed_plan: Plan | None = None
    _preparing: bool = False

    def __post_init__(self, info: BackboneInfo, files: DataFiles) -> None:
        continued = self.arguments.load if self.manifest is not None else None
        self.registry = TaskRegistry(
            self.engine,
            self.parallel,
            self.reporter,
            info,
            files,
            self._evaluate,
            self._save,
            continued,
            saves=self.arguments.save is not None,
        )
        if self.arguments.save is not None:
            fingerprint, arguments = self.engine.backbone.info.fingerprint, self.arguments
            self._saver = Saver(
                self.arguments.save,
                fingerprint,
                arguments.mux_keep_checkpoints,
                arguments.mux_save_rate,
                self.parallel,
                arguments.precision,
                self.reporter.owner,
                self.engine.backbone.info.shape.quantisation,
                self.lock,
            )
        self._judge = BestCheckpointTracker(self.registry.entries, self.reporter.say)
        self._is_frozen = False
        self._step_loop = StepLoop(self.arguments.mux_rolling, self.arguments.mux_watch is not None)
        self._exits = Exits(
            self.arguments.exit_interval,
            self.arguments.exit_duration_in_mins,
            self.began,
            self.manifest.steps if self.manifest is not None else 0,
        )
        directory, save = self.arguments.load, self.arguments.save
        if save is not None and self.parallel.rank == 0 and (directory == save or self.manifest is None):
            # A run that died before its first save leaves lines, too. Not before the tasks are accepted: a refused run
            # leaves everything as it is.
            self.registry.accepted = partial(self.reporter.continue_metrics, save, self.manifest)
        if self.manifest is None or directory is None:
            return
        self.registry.continue_from(self.manifest, directory, self.arguments.save)
        self.reporter.say(f"continuing from {directory} (save {self.manifest.number})")
        for change in changes_since(self.manifest, self.engine.planning, self.arguments.precision):
            self.reporter.say(change)

    def run(self) -> None:
        """Train until every task is done and, with a watched directory, until that holds a file named STOP."""
        watch = self.arguments.mux_watch
        watched = None if watch is None else WatchedDirectory(watch, self.parallel)
        idle = False
        while not (stopped := self._agreed_to_stop()):
            self.parallel.heartbeat.at("beginning the next steps")
            stop_when_done = True
            if watched is not None:
                stop_when_done = self.registry.follow(watched, self._preparing)
            self.registry.admit()
            if not self.engine.active:
                if self.registry.waiting:
                    continue  # whoever had its turn was refused
                if stop_when_done:
                    break
                if not (idle or self.registry.preparing):
                    self.reporter.say(
                        f"nothing to train: waiting for task files in {watch} (a file STOP ends the run)"
                    )
                    idle = True
                time.sleep(_IDLE_SECONDS)
                continue
            idle = False
            self._advance()
        directory = self.arguments.load
        if self._step_loop.steps or self.manifest is None:
            self._save()
            self._draw()
            directory = self.arguments.save
        if self._saver is not None:
            self._saver.wait()
        if stopped:
            advice = "nothing is saved without --save"
            if directory is not None:
                advice = f"every task is saved: continue with --load {directory} --save {directory}"
            self.reporter.stopped(stopped, advice)
        raise_on_every_rank(self.reporter.problem, self.parallel)

    def close(self) -> None:
        """End what runs in the background; a save that is being written is finished."""
        unfreeze_objects()
        self.registry.close()
        if self._saver is not None:
            self._saver.close()
        self.engine.close()

    def _advance(self) -> None:
        """Run a burst of steps, report them, then evaluate and save what is due."""
        if self.watch is not None:
            self.watch.start()
        coming = list(self._due())
        run = partial(self.engine.steps, next_steps=self._step_loop.next_max_steps(coming))
        with nullcontext() if self.watch is None else self.watch.counting():
            steps = self._step_loop.run_burst(run, [left for left, _ in coming])
        self._exits.after(len(steps))
        if not self._is_frozen:
            freeze_objects()
            self._is_frozen = True
        last = self._report(steps)
        if self.watch is not None:
            self.watch.after(len(steps))
        # Every task's turn, whatever is due already.
        self._evaluate([name for name, result in last.items() if self._evaluates_after(name, result)])
        for name in self._judge.stopped():
            self.engine.finish_early(name)
            last[name] = replace(last[name], status="finished")
            self._note_status(name, last[name])
        if any(self._saves_after(name, result) for name, result in last.items()):
            self._save()
        elif self.watch is not None and any(result.status != "running" for result in last.values()):
            self.watch.flush()  # slots of tasks that leave may be taken by others
        for name, result in last.items():
            if result.status == "failed":
                self._tell_what_is_kept(name)
            if result.status != "running":
                self._judge.tell_best(name, self.arguments.save)
                self.reporter.untrack(name)
                self.engine.remove_task(name)

    def _report(self, steps: Sequence[Mapping[str, StepResult]]) -> dict[str, StepResult]:
        """Report the steps of a burst; returns each task's last result."""
        self.parallel.heartbeat.at("reporting")
        self._check_lock()
        self._plan = self.engine.last_plan or self._plan
        if self._step_loop.has_timed:
            self._timed_plan = self._plan
        if self._step_loop.is_time_to_draw:
            self._draw()
        while self.engine.planning.news:
            self.reporter.say(self.engine.planning.news.pop(0))
        last: dict[str, StepResult] = {}
        for results in steps:
            for name, result in results.items():
                self._note(name, result)
                self.reporter.step(name, result, self._step_loop.seconds)
            last |= results
        return last

    def _check_lock(self) -> None:
        """Raise a `UserError` if another run took the directory over, before lines are added to its files."""
        if self.lock is not None:
            self.lock.check()

    def _due(self) -> Iterator[Due]:
        """When each task's next evaluation and save are due, the next look at the experts, and the exit."""
        yield from self._exits.due(self._step_loop.seconds)
        if self.watch is not None:
            yield from self.watch.due()
        for name in self.engine.active:
            step, spec = self.engine.progress(name)[0], self.engine.task(name).spec
            for interval in (
                self.arguments.save_interval,
                self._own_interval(name),
                spec.eval and spec.eval.eval_steps,
            ):
                if interval:
                    yield interval - step % interval, interval

    def _evaluates_after(self, name: str, result: StepResult) -> bool:
        """Whether a task is to be evaluated."""
        spec = self.engine.task(name).spec.eval
        if spec is None or result.status == "failed":
            return False
        return result.status == "finished" or result.step % spec.eval_steps == 0

    def _saves_after(self, name: str, result: StepResult) -> bool:
        """Whether a save is due."""
        intervals = self.arguments.save_interval, self._own_interval(name)
        improved = self._judge.is_best(name, result.step) and self.engine.task(name).spec.training.keeps_best
        due = any(interval and result.step % interval == 0 for interval in intervals)
        return result.status != "running" or improved or due

    def _own_interval(self, name: str) -> int | None:
        """Steps between the saves that a task asks for."""
        task = self.engine.task(name)
        epoch = math.ceil(len(task.data) / task.spec.sequences_per_step)
        return task.spec.training.save_interval(self.engine.progress(name)[1], epoch)

    def _note_status(self, name: str, result: StepResult) -> None:
        entry = self.registry.entries[name]
        entry.status, entry.reason = result.status, result.reason
        self.reporter.history[name].status = result.status

    def _note(self, name: str, result: StepResult) -> None:
        self._note_status(name, result)
        entry = self.registry.entries[name]
        if result.diverged:
            entry.health.good = False
        elif result.status != "failed":
            entry.note(result.step, result.loss)

    def _tell_what_is_kept(self, name: str) -> None:
        entry = self.registry.entries[name]
        if self._saver is None:
            return
        self._saver.wait()  # only what is complete is named
        if entry.checkpoint == entry.good:
            what = "its last good adapter is kept"
        elif entry.health.good:  # its data could not be read, which says nothing against its adapter
            what = "its last adapter is kept"
        else:
            what = "its adapter before the failing step is kept (no earlier save is known to be good)"
        self.reporter.say(f"{name}: {what}: {self._saver.directory / entry.checkpoint}")

    def _evaluate(self, names: Sequence[str]) -> None:
        """Evaluate tasks together, those that have evaluation data."""
        if not names:
            return
        self.parallel.heartbeat.at(f"evaluating {', '.join(names)}")
        results = self.engine.evaluate_together(names)
        self._check_lock()
        for name, result in results.items():
            if isinstance(result, UserError):  # on every rank
                self.reporter.say(f"{name} could not be evaluated: {result}")
            else:
                step = self.engine.progress(name)[0]
                if self.reporter.history[name].before is None:
                    for line in accuracy_measured(self.engine.task(name)):
                        self.reporter.say(line)
                self.reporter.evaluation(name, step, result)
                self._judge.note(name, self.engine.task(name).spec.training, step, result)

    def _save(self, leaving: Sequence[str] = ()) -> None:
        """One manifest for all tasks, so that a resume continues them from the same moment.

        Their states are copied; writing them goes on while steps run.
        """
        if self.watch is not None:
            self.watch.flush()
        saver = self._saver
        if saver is None:
            return
        saver.wait()
        if self.watch is not None:
            self.watch.save()
        states: list[TaskToSave] = []
        moved: list[str] = []
        for name, entry in self.registry.entries.items():
            state = TaskToSave(entry)
            if name in self.engine.tasks:
                step, _, status = self.engine.progress(name)
                entry.status = "removed" if name in leaving else status
                if status == "failed" and not entry.health.good and entry.good:
                    entry.fall_back()  # the updates since then made its loss diverge
                elif not (entry.checkpoint and entry.step == step):
                    moved.append(name)
                    entry.step, entry.checkpoint = step, checkpoint_of(name, step)
                    state.config = self.engine.adapter_config(name)
                    task = self.engine.task(name)
                    state.records = len(task.data)
                    if task.evaluation is not None:
                        state.held_out = len(task.evaluation), task.evaluation.fingerprint
                    state.config["base_model_name_or_path"] = model_id(self.arguments.backbone)
                training = self.engine.task(name).spec.training
                state.limit = training.save_total_limit
                if training.keeps_best and self._judge.is_best(name, entry.step):
                    entry.best.checkpoint = entry.checkpoint
            states.append(state)
        copies = self.engine.copy_states(moved, saver.memory)
        plan = None
        if self.parallel.rank == 0:
            # The plan a resume starts with; once no task is left, the last one.
            plan = self.engine.plan if self.engine.active else self._plan or self.engine.plan
        saver.begin(states, copies, plan, self._exits.steps)

    def _draw(self) -> None:
        """Draw the steps that were timed last, on the pipeline of the first data-parallel replica."""
        speaks = self.parallel.tp_rank == 0 and self.parallel.dp_rank == 0
        speaks = speaks and self.parallel.experts.holds_rows
        stages = everyones(self._step_loop.timed if speaks else [], self.parallel)
        everything = [action for stage in stages for action in stage]
        first, last = self._step_loop.timed_steps
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        title = f"{self.engine.planning.policy}, {self.engine.planning.stages} stage(s): {steps} as measured"
        plan = None if self._timed_plan is None else self._timed_plan.to_json()
        self._check_lock()
        self.reporter.schedule(everything, title, self.parallel.pp_size, plan)

    def _agreed_to_stop(self) -> str:
        """Compare notes with the other ranks: whether one was told to stop, or still prepares tasks.

        A signal does not reach all ranks between the same two steps, and their clocks differ.

        Returns:
            Why all of them stop now; empty: they go on.
        """
        problem = self.reporter.problem or (self._saver.problem if self._saver is not None else "")
        raise_on_every_rank(problem, self.parallel)
        # Every rank runs equally many steps, as long as they take on the slowest rank.
        preparing, seconds = float(self.registry.preparing), self._step_loop.seconds
        agreed = self.parallel.most([float(self.stopping), preparing, seconds, self._exits.clock])
        stopping, preparing, self._step_loop.seconds, self._exits.elapsed = agreed
        self._preparing = preparing > 0
        if stopping:
            return "by a signal"
        return self._exits.reason(is_training=bool(self.engine.active or self.registry.waiting))


def changes_since(manifest: Manifest, planning: Planning, precision: str) -> Iterator[str]:
    """Yield what a run does otherwise than the one whose save it continues, so that results differ.

    Args:
        manifest: The save.
        planning: Of the run that continues it.
        precision: In what that run computes, see `MuxArguments.precision`.
    """
    before = manifest.plan
    split = tuple(before.get("split", ()))
    same = (before["policy"], before["stages"]) == (planning.policy, planning.stages)
    if not same or (split and split != tuple(planning.split)):
        yield (
            f"it was saved with policy {before['policy']} on {before['stages']} stage(s): going on with "
            f"{planning.policy} on {planning.stages} rounds differently"
        )
    if manifest.precision and manifest.precision != precision:
        yield (
            f"it was saved by a run in {manifest.precision}: going on in {precision} rounds differently "
            "(--mux-fp32, --mux-tf32 and --bf16 choose)"
        )
