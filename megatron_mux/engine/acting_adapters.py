"""Adapters that act in steps beside their gradients: diff pruning's regulariser and its mask."""

from __future__ import annotations

from torch import Tensor

from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import TaskState
from megatron_mux.runtime import Parallel


class ActingAdapters(StepExtension):
    """Calls the adapters of kinds that ask for it: see `AdapterSpec.acts_in_steps`."""

    @classmethod
    def wanted_by(cls, task: TaskState, parallel: Parallel) -> bool:
        """Whether the task's kind of adapter asks for it."""
        return bool(task.adapter.spec.acts_in_steps)

    def _acting(self, bucket: int) -> list[tuple[int, TaskState]]:
        """The tasks of a bucket that act, with their places in it."""
        tasks = (self.burst.tasks[name] for name in self.burst.bucket(bucket).tasks)
        return [(i, task) for i, task in enumerate(tasks) if task.adapter.spec.acts_in_steps]

    def before_sums(self, bucket: int) -> None:
        """Add the gradients of regularisers: on the first pipeline alone, since pipelines are summed."""
        if self.burst.parallel.dp_rank == 0:
            for _, task in self._acting(bucket):
                task.adapter.penalty(task.step + self.burst.step(bucket))

    def after_update(self, bucket: int, skip: Tensor) -> None:
        """Let adapters change their parameters, unless their step was skipped."""
        for i, task in self._acting(bucket):
            task.adapter.after_step(task.step + self.burst.step(bucket) + 1, skip[i])
            task.adapter.flat_params.refresh()

    def after_steps(self) -> None:
        """Undo what adapters have noted of steps that were skipped."""
        for task in self.burst.tasks.values():
            if task.adapter.spec.acts_in_steps:
                task.adapter.rollback_after(task.step)
