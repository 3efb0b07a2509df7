"""The interface of what only some tasks ask of a training step: further losses, and columns of buckets' statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_mux.batch.balancing import RouterLoadAccumulator
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.batches import Burst
from megatron_mux.engine.out_of_memory import Stages
from megatron_mux.engine.task_state import TaskState
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.runtime import Parallel


class StepExtension(ABC):
    """What only some tasks ask of a training step, which calls its extensions at these moments and knows none by name.

    One is made for each burst with tasks that ask for it (`extensions.py` lists all kinds); here it does nothing. It
    may change a loss, and may have columns of its own in the statistics that end buckets' steps (`bucket_finalizer`):
    K rows, one for each task of the bucket, whether the task asks for it or not.

    Args:
        burst: The steps.
    """

    summed: ClassVar[bool] = False
    """Whether its columns are sums over all stages and ranks; a task with a value that is not finite then fails."""

    read: ClassVar[bool] = True
    """Whether the host reads its columns once the steps are done."""

    def __init__(self, burst: Burst) -> None:
        self.burst = burst

    @classmethod
    @abstractmethod
    def wanted_by(cls, task: TaskState, parallel: Parallel) -> bool:
        """Whether a task asks for it; the same on every rank."""

    def width(self, names: Sequence[str]) -> int:
        """Number of columns in the statistics of a bucket with these tasks."""
        return 0

    def before_steps(self, stages: Stages, communicator: Communicator) -> None:
        """Called on every rank before the first pass; not in a trial."""

    def before_loss(self, bucket: int, batch: PackedBatch) -> None:
        """On the last stage, before the losses of a batch: may give it a `row_scale`."""

    def after_loss(self, bucket: int, batch: PackedBatch, nll: Tensor) -> None:
        """On the last stage, after a batch's forward pass.

        Args:
            bucket: Its index, counted on over the steps of a burst.
            nll: `[N]` fp32 negative log-likelihoods of its labelled rows.
        """

    def before_backward(self, bucket: int, batch: PackedBatch) -> None:
        """Called before the backward pass of a batch on the last stage."""

    def after_chunk(self, bucket: int, accumulator: RouterLoadAccumulator | None) -> None:
        """Called after the last backward pass of a chunk on this rank.

        Args:
            bucket: Its index, counted on over the steps of a burst.
            accumulator: Router loads of its micro-batch, if it has any and this was its last chunk.
        """

    def after_passes(self, bucket: int, losses: Tensor) -> None:
        """On the last stage, after all passes of a bucket and before gradients are summed.

        Args:
            bucket: Its index, counted on over the steps of a burst.
            losses: `[tasks]` fp64 of this pipeline; may be changed.
        """

    def before_sums(self, bucket: int) -> None:
        """After all passes of a bucket, before gradients are summed over ranks; may run out of memory."""

    def local_sums(self, bucket: int, rows: Tensor) -> Tensor:
        """`[columns, K]` fp64, this rank's share of columns that are summed; `rows` are its tasks' numbers."""
        return torch.empty(0, len(rows), dtype=torch.float64, device=rows.device)

    def columns_of_last_stage(self, bucket: int) -> Tensor:
        """`[K, columns]` fp64 that the last stage begins with, once gradients are summed, if they are not `summed`."""
        rows = len(self.burst.bucket(bucket).tasks)
        return torch.empty(rows, 0, dtype=torch.float64, device=self.burst.parallel.device)

    def on_first_stage(self, bucket: int, columns: Tensor) -> None:
        """With several stages, on the first one, before norms are taken: `columns` came from the last stage."""

    def on_last_stage(self, bucket: int, columns: Tensor) -> None:
        """On the last stage, before the optimizers step: `columns` came back from the first stage."""

    def complete(self, stats: Tensor) -> None:
        """On the last stage, once the statistics have this stage's share in it."""

    def after_update(self, bucket: int, skip: Tensor) -> None:
        """After a bucket's optimizers have stepped, but for tasks with `skip`, `[K]` bool; not in a trial."""

    def after_steps(self) -> None:
        """Called once the host knows how many steps tasks have done."""

    def problem(self, values: Sequence[float]) -> str:
        """Why a task fails with these values of its columns; empty: it does not."""
        return ""

    def fields(self, step: int, name: str, values: Sequence[float]) -> Mapping[str, Any]:
        """Fields of a task's `StepResult` by these values of its columns in a step of the burst."""
        return {}
