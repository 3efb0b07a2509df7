"""The top-level `scheduler` of a task file: how configurations of sweeps are compared, and which stop early."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_mux.section import LARGEST_COUNT, Section, problem
from megatron_mux.tasks.keeping import is_lower_better, measured
from megatron_mux.tasks.spec import TaskSpec


class SchedulerSpec(Section):
    """Compares the configurations of each sweep with each other."""

    type: Literal["halving", "median", "none"]
    """`halving`: asynchronous successive halving (ASHA, Li et al. 2020); `median`: stops what is worse than the median
    of the others (Golovin et al. 2017); `none`: all train in full."""
    metric: str = "eval_loss"
    """The figure of the evaluation that decides, with `eval_` before its name or without."""
    mode: Literal["min", "max"] | None = None
    """Whether a better adapter has it lower or higher; None: lower for losses and perplexity."""
    factor: int = Field(default=3, ge=2, le=LARGEST_COUNT)
    """Of `halving`: one of so many configurations goes on at each rung, and rungs are so many times further apart."""
    min_steps: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    """Steps that every configuration is given: the first rung of `halving`, the first comparison of `median`."""

    @model_validator(mode="after")
    def _fits_the_type(self) -> SchedulerSpec:
        if self.type == "halving" and self.min_steps is None:
            raise problem("min_steps: halving needs the steps before its first rung: give it")
        for name, types in (("factor", ("halving",)), ("min_steps", ("halving", "median"))):
            if name in self.model_fields_set and self.type not in types:
                raise problem(f"{name}: is of type: {' or '.join(types)}: leave it out")
        return self

    @property
    def figure(self) -> str:
        """The deciding figure, without `eval_`."""
        return self.metric.removeprefix("eval_")

    @property
    def is_greater_better(self) -> bool:
        """Whether a better adapter has the figure higher."""
        return self.mode == "max" if self.mode is not None else not is_lower_better(self.figure)

    def problem_with(self, spec: TaskSpec) -> str:
        """Why a task's evaluations cannot be compared; empty if they can."""
        if spec.eval is None:
            return f"scheduler.metric: {self.metric} is of an evaluation: add an eval section"
        steps = spec.training.max_steps
        if (
            self.type == "halving"
            and steps is not None
            and self.min_steps is not None
            and steps <= self.min_steps
        ):
            return f"scheduler.min_steps: {self.min_steps} is not less than its {steps} steps: nothing is compared"
        known = measured(spec.eval, spec.training.figures if spec.training.is_preference else ())
        if self.figure in known:
            return ""
        names = ", ".join(f"eval_{name}" for name in known)
        return f"scheduler.metric: {self.metric!r} is not measured: use one of {names}, or name it in eval.metrics"
