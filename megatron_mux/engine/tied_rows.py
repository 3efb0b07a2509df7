"""Gradients of rows that stand for both the embedding and the output layer, summed over both ends of a pipeline.

The two stages hold a copy each and must take the same steps. Their gradients travel as further columns of the
statistics that buckets send anyway: from the last stage to the first, which adds its own and counts their norm, and
back as the sum. The rows are few (`trainable_token_indices`).
Shapes: K tasks of a bucket, C columns: values of the largest such rows of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_mux.engine.batches import Burst
from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import TaskState
from megatron_mux.runtime import Parallel


class TiedRows(StepExtension):
    """The columns of buckets' statistics for such rows."""

    read = False

    def __init__(self, burst: Burst) -> None:
        super().__init__(burst)
        sizes = {name: _values(task) for name, task in burst.tasks.items()}
        self._values = {name: size for name, size in sizes.items() if size}

    @classmethod
    def wanted_by(cls, task: TaskState, parallel: Parallel) -> bool:
        """Whether the task trains such rows; without a pipeline there is nothing to sum."""
        return parallel.pp_size > 1 and _values(task) > 0

    def width(self, names: Sequence[str]) -> int:
        """C of these tasks."""
        return max((self._values.get(name, 0) for name in names), default=0)

    def columns_of_last_stage(self, bucket: int) -> Tensor:
        """The last stage's gradients."""
        names, device = self.burst.bucket(bucket).tasks, self.burst.parallel.device
        columns = torch.zeros(len(names), self.width(names), dtype=torch.float64, device=device)
        for name, row in self._rows(bucket, columns):
            row.copy_(torch.cat([gradient.flatten() for gradient in self._gradients(name)]))
        return columns

    def on_first_stage(self, bucket: int, columns: Tensor) -> None:
        """Add the last stage's gradients to the first stage's; `columns` becomes the sum."""
        for name, row in self._rows(bucket, columns):
            for gradient, part in self._parts(name, row):
                gradient.add_(part)
                part.copy_(gradient)

    def on_last_stage(self, bucket: int, columns: Tensor) -> None:
        """Replace the last stage's gradients by the sum."""
        for name, row in self._rows(bucket, columns):
            for gradient, part in self._parts(name, row):
                gradient.copy_(part)

    def _rows(self, bucket: int, columns: Tensor) -> list[tuple[str, Tensor]]:
        rows = zip(self.burst.bucket(bucket).tasks, columns, strict=True)
        return [(name, row[: self._values[name]]) for name, row in rows if name in self._values]

    def _parts(self, name: str, row: Tensor) -> list[tuple[Tensor, Tensor]]:
        gradients = self._gradients(name)
        parts = row.split([gradient.numel() for gradient in gradients])
        return [(g, part.view_as(g)) for g, part in zip(gradients, parts, strict=True)]

    def _gradients(self, name: str) -> list[Tensor]:
        gradients = []
        for _, parameter in self.burst.tasks[name].adapter.rows.tied:
            assert parameter is not None and parameter.value.grad is not None
            gradients.append(parameter.value.grad)
        return gradients


def _values(task: TaskState) -> int:
    """Values of the tied rows that a task trains."""
    adapter = task.adapter
    return sum(math.prod(matrix.size(adapter.host.shape)) for matrix, _ in adapter.rows.tied)
