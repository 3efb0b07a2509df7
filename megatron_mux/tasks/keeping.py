"""The fields of `training` for what is kept of a task: its best adapter, when it stops, when it is saved.

Spellings and defaults are those of `transformers.TrainingArguments` and `EarlyStoppingCallback`. No update depends on
them, only how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from megatron_mux.section import LARGEST_COUNT, Number, Section, TidyNumber, problem
from megatron_mux.tasks.evaluation import LOWER_IS_BETTER, EvalSpec

_SAVE_STEPS = 500
"""The default of `save_steps` in `transformers`, where `save_strategy: steps` asks for it."""
_ROUGE = ("rouge1", "rouge2", "rougeL")


def is_lower_better(figure: str) -> bool:
    """Whether a better model has a figure of an evaluation lower, by its name."""
    return figure in LOWER_IS_BETTER or figure.endswith("loss")


def measured(evaluation: EvalSpec, figures: Sequence[str] = ()) -> Sequence[str]:
    """The figures of an evaluation, by their names.

    Args:
        evaluation: The task's `eval` section.
        figures: Measured besides the loss, whatever `eval.metrics` says; none of them: it says.
    """
    names = ["loss", *(figures or evaluation.metrics)]
    if "rouge" in names:
        names[names.index("rouge") :] = [*_ROUGE, *names[names.index("rouge") + 1 :]]
    return names


class KeepingFields(Section):
    """Best adapter, early stopping and saves of a task."""

    load_best_model_at_end: bool = False
    """Keep the adapter with the best evaluation in `DIR/<task>/best`."""
    metric_for_best_model: str | None = None
    """The figure of the evaluation that decides, with `eval_` before its name or without; None: `eval_loss`."""
    greater_is_better: bool | None = None
    """Whether a better adapter has it higher; None: unless it is a loss or a perplexity."""
    early_stopping_patience: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """Stop after so many evaluations in a row that improve nothing; None: go on to the last step."""
    early_stopping_threshold: Number = Field(default=0.0, ge=0)
    """By how much an evaluation must be better to count as an improvement."""
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """When the task asks for a save of the run, besides --save-interval; `best`: after an improvement."""
    save_steps: TidyNumber | None = Field(default=None, gt=0, le=LARGEST_COUNT)
    """Steps between saves; below 1, a share of all steps."""
    save_total_limit: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """How many of the task's checkpoints are kept, besides the best and the last good one."""

    @model_validator(mode="after")
    def _save_steps_are_whole(self) -> KeepingFields:
        steps = self.save_steps
        if steps is not None and steps > 1 and steps != int(steps):
            raise problem(f"save_steps must be a whole number, or a share below 1, got {steps}")
        if steps is not None and self.save_strategy not in (None, "steps"):
            raise problem(
                f"save_steps belongs to save_strategy: steps, not to {self.save_strategy}: leave one out"
            )
        if self.early_stopping_threshold and self.early_stopping_patience is None:
            raise problem(
                "early_stopping_threshold needs early_stopping_patience: give it, or leave both out"
            )
        return self

    @property
    def compares(self) -> bool:
        """Whether evaluations are compared with each other."""
        return self.keeps_best or self.early_stopping_patience is not None

    @property
    def keeps_best(self) -> bool:
        """Whether the best adapter is kept."""
        return self.load_best_model_at_end or self.save_strategy == "best"

    @property
    def metric(self) -> str:
        """The deciding figure, without `eval_`."""
        return (self.metric_for_best_model or "loss").removeprefix("eval_")

    @property
    def is_greater_better(self) -> bool:
        """Whether a better adapter has the figure higher."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not is_lower_better(self.metric)

    def problem_of_metric(self, evaluation: EvalSpec | None, figures: Sequence[str]) -> str:
        """Why evaluations cannot be compared; empty if they can, or need not.

        Args:
            evaluation: The task's `eval` section.
            figures: Measured besides the loss, whatever `eval.metrics` says; none of them: it says.
        """
        if not self.compares:
            return ""
        if evaluation is None:
            name = "load_best_model_at_end" if self.load_best_model_at_end else "early_stopping_patience"
            name = name if self.save_strategy != "best" else "save_strategy: best"
            return f"training.{name}: compares evaluations: add an eval section"
        known = measured(evaluation, figures)
        if self.metric not in known:
            return (
                f"training.metric_for_best_model: {self.metric_for_best_model!r} is not measured: use one of "
                f"{', '.join(f'eval_{name}' for name in known)}{'' if figures else ', or name it in eval.metrics'}"
            )
        return ""

    def save_interval(self, total_steps: int, steps_per_epoch: int) -> int | None:
        """Steps between the saves that the task asks for; None: it asks for none.

        Args:
            total_steps: Of the task.
            steps_per_epoch: Steps of one pass over its data.
        """
        if self.save_strategy == "epoch":
            return steps_per_epoch
        if self.save_strategy == "steps" or (self.save_strategy is None and self.save_steps is not None):
            steps = self.save_steps or _SAVE_STEPS
            return int(steps) if steps >= 1 else math.ceil(total_steps * steps)
        return None
