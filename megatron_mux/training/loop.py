"""The loop: step the engine, report, have callbacks do what is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from megatron_mux.arguments import MuxArguments
from megatron_mux.checkpoint import Manifest
from megatron_mux.engine import StepResult
from megatron_mux.engine.agreement import raise_on_every_rank
from megatron_mux.training.callback import Callback, overrides, save_run
from megatron_mux.training.commands import CommandSource
from megatron_mux.training.step_loop import Due, StepLoop
from megatron_mux.training.task_registry import TaskRegistry

_IDLE_SECONDS = 0.5


@dataclass
class Loop:
    """Steps the engine and has callbacks do what is due between steps.

    Attributes:
        arguments: The command line.
        registry: The tasks of the run, and the callbacks, called in their order.
        step_loop: Runs bursts of steps.
        commands: Tells which tasks are to join, pause, go on and leave.
        check: Raises a `UserError` if another run took the directory over; called before lines are added to its files.
        manifest: The save to continue from, if any.
        began: When the run began, by `time.monotonic`.
        stopping: Set by a signal: save and leave after the current steps.
    """

    arguments: MuxArguments
    registry: TaskRegistry
    step_loop: StepLoop
    commands: CommandSource
    check: Callable[[], None]
    manifest: Manifest | None = None
    began: float = field(default_factory=time.monotonic)
    stopping: bool = False
    _preparing: bool = False

    def __post_init__(self) -> None:
        self.engine, self.reporter = self.registry.engine, self.registry.reporter
        self.parallel, self.callbacks = self.registry.parallel, self.registry.callbacks
        # What is called burst by burst.
        self._state_changes = overrides(self.callbacks, Callback.state_changed)
        self._reasons_to_exit = overrides(self.callbacks, Callback.reason_to_exit)
        self._before_steps = overrides(self.callbacks, Callback.before_steps)
        self._dues = overrides(self.callbacks, Callback.due)
        self._around_steps = overrides(self.callbacks, Callback.around_steps)
        self._after_steps = overrides(self.callbacks, Callback.after_steps)
        self._between_steps = overrides(self.callbacks, Callback.between_steps)
        self._idles = overrides(self.callbacks, Callback.idle) or [Callback().idle]

    def run(self) -> None:
        """Train until every task is done. Where tasks may join, a command says that no more will."""
        idle = False
        while not (stopped := self._agreed_to_stop()):
            self.parallel.heartbeat.at("beginning the next steps")
            self._tell_changes()
            stop_when_done = self.registry.follow(self.commands.poll(), self._preparing)
            self.registry.admit()
            self._tell_changes()
            if True in [work() for work in self._between_steps]:  # each of them works
                continue
            if not self.engine.active:
                if self.registry.waiting or any(callback.undecided for callback in self.callbacks):
                    continue  # whoever had its turn was refused
                if stop_when_done:
                    paused = self.registry.paused
                    stopped = f"with {', '.join(paused)} paused" if paused else ""
                    break
                if not (idle or self.registry.preparing):
                    self.reporter.say(f"nothing to train: waiting for {self.commands.awaited}")
                    idle = True
                self._idles[0](_IDLE_SECONDS)
                continue
            idle = False
            self._advance()
        directory = self.arguments.load
        if self.step_loop.steps or self.manifest is None:
            save_run(self.callbacks)
            for callback in self.callbacks:
                callback.after_last_steps()
            directory = self.arguments.save
        for callback in self.callbacks:
            callback.finish()
        if stopped:
            advice = "nothing is saved without --save"
            if directory is not None:
                advice = f"every task is saved: continue with --load {directory} --save {directory}"
            self.reporter.stopped(stopped, advice)
            self.registry.stop()
        self._tell_changes()
        raise_on_every_rank(self.reporter.problem, self.parallel)

    def close(self) -> None:
        """End what runs in the background; a save that is being written is finished."""
        self.registry.close()
        for callback in self.callbacks:
            callback.close()
        self.engine.close()

    def _tell_changes(self) -> None:
        """Tell callbacks which tasks have changed their states."""
        changes = self.registry.lives.changes
        while changes:
            change = changes.pop(0)
            for tell in self._state_changes:
                tell(change)

    def _advance(self) -> None:
        """Run a burst of steps, report them, then do what is due."""
        for begin in self._before_steps:
            begin()
        coming = list(self._due())
        run = partial(self.engine.steps, next_steps=self.step_loop.next_max_steps(coming))
        with ExitStack() as around:
            for context in self._around_steps:
                around.enter_context(context())
            steps = self.step_loop.run_burst(run, [left for left, _ in coming])
        last = self._report(steps)
        for follow in self._after_steps:
            follow(len(steps))
        if any(self._is_due(name, result) for name, result in last.items()):
            self._act(last)

    def _due(self) -> Iterator[Due]:
        """What the next burst of steps ends at."""
        for due in self._dues:
            yield from due(self.step_loop.seconds)
        for name in self.engine.active:
            step = self.engine.progress(name)[0]
            for interval in self.registry.intervals[name]:
                yield interval - step % interval, interval

    def _report(self, steps: Sequence[Mapping[str, StepResult]]) -> dict[str, StepResult]:
        """Report the steps of a burst; returns each task's last result."""
        self.parallel.heartbeat.at("reporting")
        self.check()
        for callback in self.callbacks if self.step_loop.has_timed else ():
            callback.after_first_steps(self.step_loop.is_time_to_draw)
        while self.engine.planning.log_lines:
            self.reporter.say(self.engine.planning.log_lines.pop(0))
        last: dict[str, StepResult] = {}
        for results in steps:
            for name, result in results.items():
                self.registry.note(name, result)
                self.reporter.step(name, result, self.step_loop.seconds)
            last |= results
        return last

    def _is_due(self, name: str, result: StepResult) -> bool:
        """Whether a task is done, or has reached one of its intervals."""
        intervals = self.registry.intervals[name]
        return result.status != "running" or any(result.step % interval == 0 for interval in intervals)

    def _act(self, last: dict[str, StepResult]) -> None:
        """Do what is due after a burst; tasks that are done leave."""
        for callback in self.callbacks:
            callback.when_due(last)
        names = dict.fromkeys(name for callback in self.callbacks for name in callback.tasks_to_save(last))
        if names:
            self.registry.save([*names])  # in the same order on every rank
        for name, result in last.items():
            if result.status != "running":
                for callback in self.callbacks:
                    callback.task_done(name, result)
                self.reporter.untrack(name)
                self.engine.remove_task(name)

    def _agreed_to_stop(self) -> str:
        """Compare notes with the other ranks: whether one was told to stop, or still prepares tasks.

        A signal does not reach all ranks between the same two steps, and their clocks differ.

        Returns:
            Why all of them stop now; empty: they go on.
        """
        problems = [self.reporter.problem, *(callback.problem for callback in self.callbacks)]
        problem = next(filter(None, problems), "")
        # Every rank runs equally many steps, as long as they take on the slowest rank.
        preparing, seconds = float(self.registry.preparing), self.step_loop.seconds
        elapsed = time.monotonic() - self.began
        agreed = self.parallel.most([float(bool(problem)), float(self.stopping), preparing, seconds, elapsed])
        failed, stopping, preparing, self.step_loop.seconds, elapsed = agreed
        if failed:
            raise_on_every_rank(problem, self.parallel)
        self._preparing = preparing > 0
        if stopping:
            return "by a signal"
        for reason in self._reasons_to_exit:
            is_training = self.engine.active or self.registry.waiting or self.registry.paused
            if why := reason(elapsed, bool(is_training)):
                return why
        return ""
