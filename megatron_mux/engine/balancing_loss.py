"""The balancing losses of tasks that ask for one, as columns of their buckets' statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_mux.batch.balancing import RouterLoadAccumulator
from megatron_mux.engine.batches import Burst
from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import TaskState
from megatron_mux.runtime import Parallel


class BalancingLosses(StepExtension):
    """Sums each task's balancing loss over micro-batches, layers and ranks (see `batch.balancing`)."""

    summed = True

    def __init__(self, burst: Burst) -> None:
        super().__init__(burst)
        self._coefficients = {
            name: task.task.spec.training.router_aux_loss_coef for name, task in burst.tasks.items()
        }
        shape = (len(burst.steps) * len(burst.buckets), len(burst.tasks))
        self._losses = torch.zeros(shape, dtype=torch.float64, device=burst.parallel.device)

    @classmethod
    def wanted_by(cls, task: TaskState, parallel: Parallel) -> bool:
        """Whether the task has a coefficient."""
        return bool(task.task.spec.training.router_aux_loss_coef)

    def width(self, names: Sequence[str]) -> int:
        """One column if a task of the bucket asks for it."""
        return int(any(self._coefficients[name] for name in names))

    def after_chunk(self, bucket: int, accumulator: RouterLoadAccumulator | None) -> None:
        """Add the weighted losses of a micro-batch that is done."""
        if accumulator is not None:
            accumulator.add_losses(self._losses[bucket])

    def local_sums(self, bucket: int, rows: Tensor) -> Tensor:
        """`[1, K]`, weighted, of this pipeline's sequences in this rank's layers."""
        return self._losses[bucket][rows].unsqueeze(0)

    def problem(self, values: Sequence[float]) -> str:
        """A loss that is not finite."""
        return "" if math.isfinite(values[0]) else f"its balancing loss was {values[0]}"

    def fields(self, step: int, name: str, values: Sequence[float]) -> Mapping[str, Any]:
        """The loss before its coefficient."""
        coefficient = self._coefficients[name]
        return {"router_aux_loss": values[0] / coefficient} if coefficient else {}
