"""Evaluates tasks in their turn, and stops those that no longer improve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_mux.engine import StepResult
from megatron_mux.errors import UserError
from megatron_mux.training.best import BestCheckpointTracker
from megatron_mux.training.callback import Callback
from megatron_mux.training.eval_setup import accuracy_measured
from megatron_mux.training.task_registry import TaskRegistry


@dataclass(eq=False)
class Evaluations(Callback):
    """Evaluates tasks before their first step, every so many steps, and after the last.

    Attributes:
        registry: The tasks of the run.
        tracker: Compares the evaluations of each task.
        check: Raises a `UserError` if another run took the directory over.
    """

    registry: TaskRegistry
    tracker: BestCheckpointTracker
    check: Callable[[], None]

    def intervals(self, name: str) -> Iterable[int]:
        """Yield after how many steps each a task is evaluated."""
        spec = self.registry.engine.task(name).spec.eval
        if spec is not None:
            yield spec.eval_steps

    def before_first_step(self, names: Sequence[str]) -> None:
        """Evaluate the adapters that tasks begin with."""
        self._evaluate(names)

    def when_due(self, last: dict[str, StepResult]) -> None:
        """Evaluate every task whose turn it is. Those whose patience is over are finished."""
        self._evaluate([name for name, result in last.items() if self._is_due(name, result)])
        for name in self.tracker.stopped():
            self.registry.engine.finish_early(name)
            last[name] = replace(last[name], status="finished")

    def _is_due(self, name: str, result: StepResult) -> bool:
        """Whether a task is to be evaluated."""
        if result.status == "failed":
            return False
        if any(result.status == "finished" or result.step % own == 0 for own in self.intervals(name)):
            return True
        return any(result.step in callback.evaluation_steps(name) for callback in self.registry.callbacks)

    def _evaluate(self, names: Sequence[str]) -> None:
        """Evaluate tasks together, those that have evaluation data."""
        if not names:
            return
        engine, reporter = self.registry.engine, self.registry.reporter
        engine.parallel.heartbeat.at(f"evaluating {', '.join(names)}")
        results = engine.evaluate_together(names)
        self.check()
        for name, result in results.items():
            if isinstance(result, UserError):  # on every rank
                reporter.say(f"{name} could not be evaluated: {result}")
                continue
            step, task = engine.progress(name)[0], engine.task(name)
            if reporter.history[name].before is None:
                for line in accuracy_measured(task):
                    reporter.say(line)
            reporter.evaluation(name, step, result)
            self.tracker.note(name, task.spec.training, step, result)
            for callback in self.registry.callbacks:
                callback.evaluated(name, step, result)
