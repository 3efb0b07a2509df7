"""The top-level `scheduler` of a task file: how configurations of sweeps are compared, and which stop early."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, ValidationError

from megatron_mux.data.section import DataSource
from megatron_mux.section import LARGEST_COUNT, Section
from megatron_mux.tasks.keeping import is_lower_better, measured
from megatron_mux.tasks.spec import TaskSpec
from megatron_mux.tasks.sweep import Sweep
from megatron_mux.tasks.wording import sentences

LEAST_OTHERS = 3
"""Configurations that `median` compares one with, at least."""


class SchedulerSpec(Section):
    """Compares the configurations of each sweep with each other; `read_scheduler` checks what its type asks for."""

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

    @property
    def figure(self) -> str:
        """The deciding figure, without `eval_`."""
        return self.metric.removeprefix("eval_")

    @property
    def is_greater_better(self) -> bool:
        """Whether a better adapter has the figure higher."""
        return self.mode == "max" if self.mode is not None else not is_lower_better(self.figure)

    def problems_with(self, spec: TaskSpec) -> Iterator[str]:
        """Say why a task's evaluations cannot be compared, if they cannot."""
        if spec.training.max_steps is not None and (
            text := self.problem_of_steps(spec, spec.training.max_steps)
        ):
            yield text
        if spec.eval is None:
            yield without_eval(self.metric)
            return
        known = measured(spec.eval, spec.training.figures if spec.training.is_preference else ())
        if self.figure not in known:
            names = ", ".join(f"eval_{name}" for name in known)
            yield f"scheduler.metric: {self.metric!r} is not measured: use one of {names}, or name it in eval.metrics"

    def problem_of_steps(self, spec: TaskSpec, steps: int) -> str:
        """Why nothing is compared before a task's end; empty if something is.

        Args:
            spec: The task.
            steps: It trains in all. Those of epochs are known once its data are open.
        """
        if self.type == "none":
            return ""
        if self.min_steps is not None and steps <= self.min_steps:
            return f"scheduler.min_steps: {self.min_steps} is not less than its {steps} steps: nothing is compared"
        every = spec.eval.eval_steps if spec.eval is not None else 1
        first = every * math.ceil((self.min_steps or 1) / every)
        if self.type == "median" and first >= steps:
            after = (
                f"between step {self.min_steps} and its last" if self.min_steps else "before its last step"
            )
            return (
                f"eval.eval_steps: {every} leaves no evaluation {after} ({steps}), where median compares: "
                "give fewer"
            )
        return ""

    def problems_of(self, sweep: Sweep) -> Iterator[str]:
        """Say why configurations cannot be compared with each other, if they cannot."""
        if self.type == "none" and sweep.sampler is None:
            return
        there = len(sweep.configurations) if sweep.sampler is None else sweep.sampler.trials
        if self.type == "median" and sweep.configurations and there <= LEAST_OTHERS:
            yield (
                f"scheduler.type: median compares with three others, and there are {there} configurations: add some, "
                "or use halving"
            )
        for key in (f"eval.{name}" for name in DataSource.model_fields):
            if sweep.varies(key):
                yield f"sweep.{key}: figures of different records cannot be compared: leave it out of the sweep"


def without_eval(metric: Any) -> str:
    """Say that a task without held-out records has no figures."""
    return f"scheduler.metric: {metric} is of an evaluation: add an eval section"


def read_scheduler(given: Any) -> tuple[SchedulerSpec | None, list[str]]:
    """Read the `scheduler` of a task file; None if something is wrong with it, and what."""
    spec, problems = None, list[str]()
    try:
        spec = SchedulerSpec.model_validate(given)
    except ValidationError as error:
        problems += sentences(error, {}, SchedulerSpec)
    fields = given if isinstance(given, dict) else {}
    kind = fields.get("type")
    if kind == "halving" and fields.get("min_steps") is None:
        problems.append("min_steps: halving needs the steps before its first rung: give it")
    for name, kinds in (("factor", ("halving",)), ("min_steps", ("halving", "median"))):
        if name in fields and kind in ("halving", "median", "none") and kind not in kinds:
            problems.append(f"{name}: is of type: {' or '.join(kinds)}: leave it out")
    return (None if problems else spec), problems
