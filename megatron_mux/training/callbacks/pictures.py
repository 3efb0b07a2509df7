"""Draws the steps that were timed as a picture of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_mux.engine.agreement import everyones
from megatron_mux.fusion.plan import Plan
from megatron_mux.training.callback import Callback
from megatron_mux.training.step_loop import StepLoop
from megatron_mux.training.task_registry import TaskRegistry


@dataclass(eq=False)
class Pictures(Callback):
    """Draws after the last timed burst, and again when the run ends.

    Attributes:
        registry: The tasks of the run.
        step_loop: Times steps.
        check: Raises a `UserError` if another run took the directory over.
    """

    registry: TaskRegistry
    step_loop: StepLoop
    check: Callable[[], None]
    _plan: Plan | None = None

    def after_first_steps(self, is_last: bool) -> None:
        """Keep the plan of the steps; draw the last of them."""
        self._plan = self.registry.engine.last_plan
        if is_last:
            self.after_last_steps()

    def after_last_steps(self) -> None:
        """Draw the steps that were timed last. Those of the first data-parallel replica are shown."""
        parallel, planning = self.registry.parallel, self.registry.engine.planning
        speaks = parallel.tp_rank == 0 and parallel.dp_rank == 0 and parallel.experts.holds_rows
        stages = everyones(self.step_loop.timed if speaks else [], parallel)
        everything = [action for stage in stages for action in stage]
        first, last = self.step_loop.timed_steps
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        title = f"{planning.policy}, {planning.stages} stage(s): {steps} as measured"
        plan = None if self._plan is None else self._plan.to_json()
        self.check()
        self.registry.reporter.schedule(everything, title, parallel.pp_size, plan)
