"""The one interface of what takes part in a run. The loop knows steps, callbacks do the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from megatron_mux.engine import EvalResult, StepResult
from megatron_mux.tasks.life import StateChange
from megatron_mux.training.step_loop import Due

if TYPE_CHECKING:
    from megatron_mux.training.task_registry import TaskRegistry

P = ParamSpec("P")
R = TypeVar("R")


class Callback:
    """Does something at some moments of a run. A subclass overrides those that it needs.

    Every rank has the same callbacks in the same order, and calls each moment of them at the same time: all of them may
    use collectives. A part of a run that is off has no callback.

    Attributes:
        problem: What went wrong in the background, on this rank alone; the loop raises it on every rank before the next
            steps. Empty: nothing.
        undecided: Whether it may have commands at the next poll, the same on every rank: the run does not end before.
    """

    problem: str = ""
    undecided: bool = False

    # -- the run

    def set_up(self, registry: TaskRegistry) -> None:
        """Called once, with the run's tasks, its engine and its reporter, before tasks are registered."""

    def told(self, content: object) -> None:
        """Called with what a command has for callbacks: one that knows nothing of it does nothing."""

    def between_steps(self) -> bool:
        """Do some other work with the engine; called before each burst of steps, and while none can run.

        Returns:
            Whether there is more to do before the next steps, the same on every rank: it is called again once commands
            have been followed, and the run does not end before.
        """
        return False

    def idle(self, seconds: float) -> None:
        """Wait for so long at most, as there is nothing to do."""
        time.sleep(seconds)

    # -- tasks come and go

    def intervals(self, name: str) -> Iterable[int]:
        """Yield in multiples of which steps of a task `when_due` is called. Asked when the task is registered."""
        return ()

    def before_first_step(self, names: Sequence[str]) -> None:
        """Called when tasks are registered that have done no step, unless others train meanwhile."""

    def task_done(self, name: str, result: StepResult) -> None:
        """Called when a task is finished or has failed. It has been saved and is still registered."""

    def state_changed(self, change: StateChange) -> None:
        """Called for each change of a task's state, in their order: before the next steps, and when the run has ended.

        `tasks.life` has the states. By then other changes may have followed.
        """

    # -- evaluations

    def evaluation_steps(self, name: str) -> Collection[int]:
        """After how many steps a task is evaluated besides its `eval_steps`; multiples of one of its `intervals`."""
        return ()

    def evaluated(self, name: str, step: int, result: EvalResult) -> None:
        """Called when a task has been evaluated after `step` of its steps, before `when_due`."""

    # -- steps

    def reason_to_exit(self, elapsed: float, is_training: bool) -> str:
        """Say why the run ends now; empty: it goes on. Called before each burst of steps, and while none can run.

        Args:
            elapsed: Seconds since the run began, on the rank that began first.
            is_training: Whether a task is not done.
        """
        return ""

    def before_steps(self) -> None:
        """Called before each burst of steps."""

    def due(self, seconds: float) -> Iterable[Due]:
        """Yield in how many steps the burst is to end. Called after `before_steps`; tasks have `intervals`.

        Args:
            seconds: How long a step takes, the same on every rank; 0: not known.
        """
        return ()

    def around_steps(self) -> AbstractContextManager[None]:
        """The context in which the steps of a burst run."""
        return nullcontext()

    def after_first_steps(self, is_last: bool) -> None:
        """Called after each of the first bursts, whose actions are timed. `is_last`: after the last of them."""

    def after_steps(self, steps: int) -> None:
        """Called after each burst of so many steps, once they are reported."""

    def when_due(self, last: dict[str, StepResult]) -> None:
        """Called when a task has reached one of its `intervals` or is done. It follows `after_steps`.

        Args:
            last: The last result of each task of the burst. A callback may put another one there: one whose status is
                not `running` makes the task leave.
        """

    # -- saves

    def tasks_to_save(self, last: dict[str, StepResult]) -> Collection[str]:
        """The tasks of a burst that are to be saved now. Called after `when_due`."""
        return ()

    def before_save(self) -> None:
        """Called when the run is to be saved, before any callback does."""

    def save(self, names: Collection[str] | None, leaving: Sequence[str]) -> None:
        """Save what a resume needs. See `save_run` for the arguments."""

    # -- the end

    def after_last_steps(self) -> None:
        """Called when a run that has trained has been saved for the last time."""

    def finish(self) -> None:
        """Wait for what goes on in the background. Raises a `UserError` on every rank if it failed."""

    def close(self) -> None:
        """Called when the run ends, also by an error. Other ranks may not call it: no collectives."""


def save_run(
    callbacks: Sequence[Callback], names: Collection[str] | None = None, leaving: Sequence[str] = ()
) -> None:
    """Have callbacks save the run. Every rank calls it.

    Args:
        callbacks: All of them.
        names: The tasks whose state is written; the save names the last checkpoints of others. None: all tasks.
        leaving: Tasks that are removed before they are done.
    """
    for callback in callbacks:
        callback.before_save()
    for callback in callbacks:
        callback.save(names, leaving)


def overrides(
    callbacks: Sequence[Callback], moment: Callable[Concatenate[Callback, P], R]
) -> Sequence[Callable[P, R]]:
    """What callbacks do at a moment, in their order, without those that do nothing.

    Args:
        callbacks: All of them.
        moment: A method of `Callback`.
    """
    name = moment.__name__
    return [getattr(one, name) for one in callbacks if getattr(type(one), name) is not moment]
