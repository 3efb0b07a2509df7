"""Evaluates tasks in their turn, and stops those that no longer improve."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_mux.engine import StepResult
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec
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
        """Evaluate the adapters that tasks begin with; as the bare backbone all give the same, so once for all."""
        first: dict[Hashable, str] = {}
        alike = {
            name: first.setdefault(_begins_as(self.registry.engine.task(name).spec), name) for name in names
        }
        self._evaluate(names, alike)

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

    def _evaluate(self, names: Sequence[str], alike: Mapping[str, str] | None = None) -> None:
        """Evaluate tasks together, those that have evaluation data; `alike` names whom each gives the same as."""
        if not names:
            return
        engine, reporter = self.registry.engine, self.registry.reporter
        alike = alike or {name: name for name in names}
        computed = list(dict.fromkeys(alike.values()))
        engine.parallel.heartbeat.at(f"evaluating {', '.join(computed)}")
        found = engine.evaluate_together(computed)
        self.check()
        results = {name: found[other] for name, other in alike.items() if other in found}
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


def _begins_as(spec: TaskSpec) -> Hashable:
    """Equal for tasks whose first evaluation is the same: of the bare backbone, on the same records."""
    if spec.eval is None or spec.training.is_preference or not spec.adapter.begins_as_backbone:
        return spec.name
    return spec.data.model_dump_json(), spec.eval.model_dump_json(exclude={"eval_steps"})
