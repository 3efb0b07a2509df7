"""Finishes a bucket's step on one stage: reduces gradients, sums norms over stages, steps the optimizers.

Clipping needs the norm of a task's gradient over all stages, and only the last stage knows whether its loss is finite.
Both travel to the first stage with the bucket's last gradients and back with its next hidden states
(`pipeline.template.with_updates`), as statistics in fp64: a row per task of the bucket with its loss, its squared norm,
the number of ranks that ran out of memory, and what the extensions of its step (`step_extension`) add: first columns
that all stages sum, then others that the host reads, then the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.engine.batches import Burst
from megatron_mux.engine.optimize import gradient_buffer_size, reduce_gradients
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import StepResult
from megatron_mux.engine.updates import BucketUpdate
from megatron_mux.pipeline.action import Action

_SQUARE, _FAILED, _FIRST_OF_EXTENSIONS = 1, 2, 3
"""Columns of the statistics after the loss."""


@dataclass(frozen=True)
class _Columns:
    """Columns of a bucket's statistics.

    Attributes:
        extensions: Those of each extension that has any.
        summed: Columns up to here are sums over ranks, but for the loss.
        read: The host reads columns up to here.
        width: All columns.
    """

    extensions: Sequence[tuple[StepExtension, slice]]
    summed: int
    read: int
    width: int

    @classmethod
    def of(cls, extensions: Sequence[StepExtension], names: Sequence[str]) -> _Columns:
        """Of a bucket with these tasks."""
        placed, summed, read, at = (
            list[tuple[StepExtension, slice]](),
            _FIRST_OF_EXTENSIONS,
            _FIRST_OF_EXTENSIONS,
            3,
        )
        for extension in sorted(extensions, key=lambda one: (not one.summed, not one.read)):
            width = extension.width(names)
            if width:
                placed.append((extension, slice(at, at + width)))
                at += width
                summed, read = at if extension.summed else summed, at if extension.read else read
        return cls(placed, summed, read, at)


class BucketFinalizer:
    """Finishes the buckets of one or several steps.

    Args:
        burst: The steps.
        failed: Buckets that ran out of memory on this rank.
        buffer: `[n]` uint8 to sum gradients in, of at least `gradient_buffer_size` of these tasks.
        updates: Of each bucket.
        extensions: What the tasks ask for besides.

    Attributes:
        out_of_memory: After `finish`, the buckets whose tasks skipped their optimizer step because some rank ran out
            of memory.
    """

    def __init__(
        self,
        burst: Burst,
        failed: FailedBuckets,
        buffer: Tensor,
        updates: Sequence[BucketUpdate],
        extensions: Sequence[StepExtension],
    ) -> None:
        self.burst = burst
        self.failed = failed
        self.extensions = extensions
        self.out_of_memory: set[int] = set()
        tasks, buckets, parallel = burst.tasks, burst.buckets, burst.parallel
        self._whole: dict[int, Tensor] = {}
        # Read on the host once all steps are launched: until then nothing waits for the device.
        self._stats: list[tuple[int, Tensor]] = []
        self._counts = True
        self._skip = torch.zeros(len(tasks), dtype=torch.bool, device=parallel.device)
        order = {name: i for i, name in enumerate(tasks)}
        rows = torch.tensor([order[name] for bucket in buckets for name in bucket.tasks])
        counts = [len(bucket.tasks) for bucket in buckets]
        self._rows = runtime.to_device(rows, parallel.device).split(counts)
        self._reduces = parallel.tp_size * parallel.dp_size > 1
        self._updates = updates
        # What follows from a bucket's tasks alone, once for all steps.
        self._starts = [[tasks[name].step for name in bucket.tasks] for bucket in buckets]
        for start, update in zip(self._starts, updates, strict=True):
            update.prepare(start, len(burst.steps))
        params = [task.adapter.flat_params for task in tasks.values()]
        self._buffer = buffer[: gradient_buffer_size(params, parallel)]
        self._columns = [_Columns.of(extensions, bucket.tasks) for bucket in buckets]

    def stats_shape(self, bucket: int) -> tuple[int, int]:
        """Rows and columns of the statistics of a bucket, by its index, counted on over steps."""
        return len(self.burst.bucket(bucket).tasks), self._columns[bucket % len(self._columns)].width

    def skip_all(self) -> None:
        """Let no task step: a trial leaves adapters and optimizers as they are."""
        self._skip.fill_(True)
        self._counts = False

    def norm(self, action: Action, losses: Tensor, others: Tensor | None) -> Tensor:
        """Reduce a bucket's gradients over ranks, and add this stage's norms to those of the stages after it.

        Args:
            action: It ends a bucket's step.
            losses: `[tasks]` fp64 of the step, on the last stage: of this pipeline's sequences.
            others: The statistics of the stages after this one; None on the last.

        Returns:
            The statistics of this stage and those after it. With tensor parallelism, squares of this rank's own parts.
        """
        bucket, parallel = action.bucket, self.burst.parallel
        names, index = self.burst.bucket(bucket).tasks, bucket % len(self._columns)
        columns = self._columns[index]
        if others is None:
            for extension, _ in columns.extensions:
                extension.after_passes(bucket, losses)
        # It may allocate, so it comes before the sum over pipelines, which tells all of them who ran out of memory.
        self.failed.attempt(action, lambda: self._before_sums(bucket))
        sums = self._local_sums(bucket)
        if self._reduces:
            params = [self.burst.tasks[name].adapter.flat_params for name in names]
            reduce_gradients(params, parallel, sums, self._buffer)
        if others is not None and parallel.is_first_stage:
            for extension, place in columns.extensions:
                extension.on_first_stage(bucket, others[:, place])
        squares = self._updates[index].squared_norms()
        if others is None:
            stats = self._first_stats(bucket, losses, squares, sums)
        else:
            stats = others
            stats[:, _SQUARE] += squares
            stats[:, _FAILED : columns.summed] += sums.t()
        if parallel.is_first_stage:
            self._whole[bucket] = stats
        return stats

    def _local_sums(self, bucket: int) -> Tensor:
        """`[columns, K]` fp64, this rank's share of the columns that are sums, squared norms left out.

        They are read at the first stage of each pipeline, but summed over all pipelines: as the gradients are.
        """
        index = bucket % len(self._columns)
        columns, rows = self._columns[index], self._rows[index]
        shape, device = (columns.summed - _FAILED, len(rows)), self.burst.parallel.device
        sums = torch.full(shape, float(bucket in self.failed), dtype=torch.float64, device=device)
        for extension, place in columns.extensions:
            if extension.summed:
                sums[place.start - _FAILED : place.stop - _FAILED] = extension.local_sums(bucket, rows)
        return sums

    def _first_stats(self, bucket: int, losses: Tensor, squares: Tensor, sums: Tensor) -> Tensor:
        """The statistics that the last stage begins."""
        index, parallel = bucket % len(self._columns), self.burst.parallel
        # Each tensor rank of the last stage has the whole loss of its pipeline.
        task_losses = losses[self._rows[index]]
        if parallel.dp_size > 1:
            dist.all_reduce(task_losses, group=parallel.dp_group)
        extensions = self._columns[index].extensions
        more = [
            extension.columns_of_last_stage(bucket) for extension, _ in extensions if not extension.summed
        ]
        stats = torch.cat([torch.stack([task_losses, squares, *sums], dim=1), *more], dim=1)
        for extension in self.extensions:
            extension.complete(stats)
        return stats

    def _before_sums(self, bucket: int) -> None:
        for extension in self.extensions:
            extension.before_sums(bucket)

    def update(self, bucket: int, whole: Tensor | None) -> Tensor:
        """Step the optimizers of a bucket's tasks here, unless a task failed or ran out of memory, now or before.

        Args:
            bucket: Its index, counted on over the steps of a burst.
            whole: The statistics over all stages and tensor ranks; None on the first stage, which makes it.

        Returns:
            The statistics.
        """
        later, index = divmod(bucket, len(self._columns))
        columns, rows, parallel = self._columns[index], self._rows[index], self.burst.parallel
        if whole is None:
            whole = self._whole.pop(bucket)
            if parallel.tp_size > 1:
                sums = whole[:, _SQUARE : columns.summed].clone()
                dist.all_reduce(sums, group=parallel.tp_group)
                whole[:, _SQUARE : columns.summed] = sums
        if parallel.is_last_stage:
            for extension, place in columns.extensions:
                extension.on_last_stage(bucket, whole[:, place])
        # Once a task has skipped a step of a burst it skips those after it.
        is_finite = torch.isfinite(whole[:, : columns.summed]).all(dim=1)
        skip = self._skip[rows] | ~is_finite | (whole[:, _FAILED] > 0)
        self._skip[rows] = skip
        self._updates[index].update(self._starts[index], later, whole[:, _SQUARE].sqrt(), skip)
        for extension in self.extensions if self._counts else ():
            extension.after_update(bucket, skip)
        self._stats.append((bucket, whole[:, : columns.read]))
        return whole

    def finish(self) -> list[dict[str, StepResult]]:
        """For each step, what it gave each task, up to its failure; counts what the tasks have done."""
        results: list[dict[str, StepResult]] = [{} for _ in self.burst.steps]
        if not self._stats:
            return results
        values = iter(torch.cat([stats.flatten() for _, stats in self._stats]).tolist())
        for bucket, stats in self._stats:
            step, index = divmod(bucket, len(self._columns))
            for name in self.burst.bucket(bucket).tasks:
                row = list(islice(values, stats.shape[1]))
                if row[_FAILED]:
                    self.out_of_memory.add(index)
                if index in self.out_of_memory or self.burst.tasks[name].life.state == "failed":
                    continue
                results[step][name] = self._result(step, name, row, self._columns[index])
        for extension in self.extensions:
            extension.after_steps()
        return results

    def _result(self, step: int, name: str, row: Sequence[float], columns: _Columns) -> StepResult:
        """What a step gave a task, by its row of the statistics."""
        task = self.burst.tasks[name]
        loss, norm = row[0], math.sqrt(row[_SQUARE])
        rate = task.optimizer.learning_rate(task.step)
        problem, fields = "", dict[str, Any]()
        if not math.isfinite(loss):
            problem = f"its loss was {loss}"
        elif not math.isfinite(norm):
            problem = f"its gradient norm was {norm}"
        for extension, place in columns.extensions:
            if extension.read:
                problem = problem or extension.problem(row[place])
                fields |= extension.fields(step, name, row[place])
        reason = f"{problem} at step {task.step + 1}" if problem else ""
        if problem:
            task.life.to("failed", reason)
        else:
            task.step += 1
            if task.step >= task.total_steps:
                task.life.to("finished")
        return StepResult(
            step=task.step,
            total_steps=task.total_steps,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=self.burst.steps[step].tokens[name],
            status=task.life.status,
            reason=reason,
            diverged=bool(reason),
            **fields,
        )
