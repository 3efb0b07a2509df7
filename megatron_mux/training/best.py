"""Compares the evaluations of each task: which adapter is the best one, and who stops early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import BestEvaluation, EvalResult
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, TrainingSpec


@dataclass
class BestCheckpointTracker:
    """Judges evaluations; the same on every rank, since every rank has the same figures.

    Attributes:
        entries: Every task of the run, with its best evaluation so far.
        say: Told who stops early.
    """

    entries: Mapping[str, SavedTask]
    say: Callable[[str], None]
    _stopped: list[str] = field(default_factory=list)

    def note(self, name: str, training: TrainingSpec, step: int, result: EvalResult) -> None:
        """Compare an evaluation with those before it.

        The one before the first step does not count: it says nothing of the task, and tasks that join have none.
        """
        if not training.compares or step == 0:
            return
        entry, value = self.entries[name], result.values.get(training.metric)
        if value is None:
            self.say(
                f"{name}: its evaluation has no {training.metric}, only {', '.join(result.values)}: training goes on "
                "without metric_for_best_model"
            )
            return
        metric = f"{'highest' if training.is_greater_better else 'lowest'} {training.metric}"
        if entry.best.metric != metric:  # the first evaluation, or the run continues with another metric
            entry.best = BestEvaluation(checkpoint=entry.best.checkpoint, metric=metric)
        best = entry.best
        best.note(step, value, training.is_greater_better, training.early_stopping_threshold)
        patience = training.early_stopping_patience
        if patience is not None and best.stale >= patience:
            self._stopped.append(name)
            self.say(
                f"{name} stops early at step {step}: {best.stale} evaluations in a row did not improve on eval_"
                f"{training.metric} {best.value:.4f} of step {best.step}"
            )

    def stopped(self) -> Sequence[str]:
        """The tasks that stop early, each once."""
        names, self._stopped = self._stopped, []
        return names


def is_best(entry: SavedTask, step: int) -> bool:
    """Whether the last evaluation of a task, after `step`, was its best."""
    return entry.best.value is not None and entry.best.step == step


def check_best_is_saved(specs: Sequence[TaskSpec], saves: bool) -> None:
    """Refuse tasks that keep their best adapter, unless the run saves.

    Raises:
        UserError: Names the tasks.
    """
    names = [spec.name for spec in specs if spec.training.keeps_best]
    if names and not saves:
        raise UserError(
            f"training.load_best_model_at_end of {', '.join(names)}: the best adapter is kept on disk: use --save DIR"
        )
