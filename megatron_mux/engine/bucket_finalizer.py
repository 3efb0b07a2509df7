"""Finishes a bucket's step on one stage: reduces gradients, sums norms over stages, steps the optimizers.

Clipping needs the norm of a task's gradient over all stages, and only the last stage knows whether its loss is finite.
Both travel to the first stage with the bucket's last gradients and back with its next hidden states
(`pipeline.template.with_updates`), as a table of fp64: a row per task of the bucket with its loss, its squared norm,
the number of ranks that ran out of memory, and, if a task of the bucket asks for it, its balancing loss; then, if a
task of the bucket learns a preference, its figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux import runtime
from megatron_mux.engine.optimize import gradient_buffer_size, reduce_gradients
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.preference import PreferenceLosses
from megatron_mux.engine.task_state import StepResult, TaskState
from megatron_mux.engine.tied_rows import TiedRows
from megatron_mux.engine.updates import BucketUpdate
from megatron_mux.fusion.plan import Bucket
from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

_SQUARE, _FAILED, _BALANCING = 1, 2, 3
"""Columns of a table after the loss."""


class BucketFinalizer:
    """Finishes the buckets of one or several steps.

    Args:
        tasks: The tasks of the steps.
        buckets: Of a step.
        tokens: For each step, tokens of each task's batch.
        parallel: Where this rank stands.
        failed: Buckets that ran out of memory on this rank.
        buffer: `[n]` uint8 to sum gradients in, of at least `gradient_buffer_size` of these tasks.
        updates: Of each bucket.
        preferences: Losses and figures of preference tasks.

    Attributes:
        coefficients: Of each task with a balancing loss.
        out_of_memory: After `finish`, the buckets whose tasks skipped their optimizer step because some rank ran out
            of memory.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskState],
        buckets: Sequence[Bucket],
        tokens: Sequence[Mapping[str, int]],
        parallel: Parallel,
        failed: FailedBuckets,
        buffer: Tensor,
        updates: Sequence[BucketUpdate],
        preferences: PreferenceLosses,
    ) -> None:
        self.tasks = tasks
        self.failed = failed
        self.out_of_memory: set[int] = set()
        self.preferences = preferences
        coefficients = {name: task.task.spec.training.router_aux_loss_coef for name, task in tasks.items()}
        self.coefficients = {name: own for name, own in coefficients.items() if own}
        self.buckets = buckets
        self.tokens = tokens
        self.parallel = parallel
        self._first = {name: task.step for name, task in tasks.items()}
        self._order = {name: i for i, name in enumerate(tasks)}
        self._whole: dict[int, Tensor] = {}
        # Read on the host once all steps are launched: until then nothing waits for the device.
        self._tables: list[tuple[int, Tensor]] = []
        self._counts = True
        self._skip = torch.zeros(len(tasks), dtype=torch.bool, device=parallel.device)
        rows = torch.tensor([self._order[name] for bucket in buckets for name in bucket.tasks])
        counts = [len(bucket.tasks) for bucket in buckets]
        self._rows = runtime.to_device(rows, parallel.device).split(counts)
        self._reduces = parallel.tp_size * parallel.dp_size > 1
        arenas = [task.adapter.arena for task in tasks.values()]
        self._updates = updates
        for bucket, update in zip(buckets, updates, strict=True):
            update.prepare([self._first[name] for name in bucket.tasks], len(tokens))
        self._buffer = buffer[: gradient_buffer_size(arenas, parallel)]
        self._tied = TiedRows({name: task.adapter for name, task in tasks.items()}, parallel)
        # What follows from a bucket's tasks alone, once for all steps.
        self._starts = [[self._first[name] for name in bucket.tasks] for bucket in buckets]
        self._summed_columns = [
            _BALANCING + any(name in self.coefficients for name in bucket.tasks) for bucket in buckets
        ]
        self._read_columns = [
            summed + preferences.columns(bucket.tasks)
            for summed, bucket in zip(self._summed_columns, buckets, strict=True)
        ]
        self._acting = [
            [(i, name) for i, name in enumerate(bucket.tasks) if tasks[name].adapter.spec.acts_after_steps]
            for bucket in buckets
        ]

    def bucket(self, entry: int) -> Bucket:
        """A bucket, counted on over steps."""
        return self.buckets[entry % len(self.buckets)]

    def step(self, entry: int) -> int:
        """The step of a bucket that is counted on over steps."""
        return entry // len(self.buckets)

    def table_shape(self, entry: int) -> tuple[int, int]:
        """Rows and columns of the table of a bucket, counted on over steps."""
        names = self.bucket(entry).tasks
        return len(names), self._read(entry) + self._tied.width(names)

    def _read(self, entry: int) -> int:
        """Columns of a bucket's table before those of `TiedRows`: those that are read on the host."""
        return self._read_columns[entry % len(self.buckets)]

    def _summed(self, entry: int) -> int:
        """Columns before the figures of preference tasks: all but the first are sums over ranks."""
        return self._summed_columns[entry % len(self.buckets)]

    def skip_all(self) -> None:
        """Let no task step: a trial leaves adapters and optimizers as they are."""
        self._skip.fill_(True)
        self._counts = False

    def norm(
        self,
        action: Action,
        losses: Tensor,
        balancing: Tensor,
        others: Tensor | None,
        figures: Tensor | None = None,
    ) -> Tensor:
        """Reduce a bucket's gradients over ranks, and add this stage's norms to those of the stages after it.

        Args:
            action: It ends a bucket's step.
            losses: `[tasks]` fp64 of the step, on the last stage: of this pipeline's sequences.
            balancing: `[tasks]` fp64 of this pipeline's sequences in this rank's layers, weighted.
            others: The table of the stages after this one; None on the last.
            figures: On the last stage, those of the bucket's tasks over all pipelines, if some learn a preference.

        Returns:
            The table of this stage and those after it. With tensor parallelism, squares of this rank's own parts.
        """
        entry = action.bucket
        names, device = self.bucket(entry).tasks, self.parallel.device
        rows, count = self._rows[entry % len(self.buckets)], len(names)
        columns, read = self._summed(entry), self._read(entry)
        # It may allocate, so it comes before the sum over pipelines, which tells all of them who ran out of memory.
        self.failed.attempt(action, lambda: self._penalise(names, self.step(entry)))
        # Read at the first stage of each pipeline, but summed over all pipelines: as the gradients are.
        sums = torch.full(
            (columns - _FAILED, count), float(entry in self.failed), dtype=torch.float64, device=device
        )
        if columns > _BALANCING:
            sums[_BALANCING - _FAILED] = balancing[rows]
        if self._reduces:
            arenas = [self.tasks[name].adapter.arena for name in names]
            reduce_gradients(arenas, self.parallel, sums, self._buffer)
        if others is not None and self.parallel.is_first_stage:
            self._tied.add(names, others[:, read:])
        squares = self._updates[entry % len(self.buckets)].squared_norms()
        if others is None:
            # Each tensor rank of the last stage has the whole loss of its pipeline.
            own = losses[rows]
            if self.parallel.dp_size > 1:
                dist.all_reduce(own, group=self.parallel.dp_group)
            parts = [torch.stack([own, squares, *sums], dim=1), self._tied.send(names, device)]
            table = torch.cat(parts if figures is None else [parts[0], figures, parts[1]], dim=1)
            if self.parallel.experts.divides_adapters:
                # Each of them owns a part of the adapters, and the master has the losses.
                dist.all_reduce(table, group=self.parallel.experts.group)
        else:
            table = others
            table[:, _SQUARE] += squares
            table[:, _FAILED:columns] += sums.t()
        if self.parallel.is_first_stage:
            self._whole[entry] = table
        return table

    def _penalise(self, names: Sequence[str], step: int) -> None:
        """Add the gradients of regularisers: on the first pipeline alone, since pipelines are summed."""
        if self.parallel.dp_rank == 0:
            for name in names:
                self.tasks[name].adapter.penalty(self._first[name] + step)

    def update(self, entry: int, whole: Tensor | None) -> Tensor:
        """Step the optimizers of a bucket's tasks here, unless a task failed or ran out of memory, now or before.

        Args:
            entry: The bucket, counted on over steps.
            whole: The table over all stages and tensor ranks; None on the first stage, which makes it.

        Returns:
            The table.
        """
        names, columns, read = self.bucket(entry).tasks, self._summed(entry), self._read(entry)
        if whole is None:
            whole = self._whole.pop(entry)
            if self.parallel.tp_size > 1:
                own = whole[:, _SQUARE:columns].clone()
                dist.all_reduce(own, group=self.parallel.tp_group)
                whole[:, _SQUARE:columns] = own
        if self.parallel.is_last_stage:
            self._tied.receive(names, whole[:, read:])
        rows = self._rows[entry % len(self.buckets)]
        # Once a task has skipped a step of a burst it skips those after it.
        skip = self._skip[rows] | ~torch.isfinite(whole[:, :columns]).all(dim=1) | (whole[:, _FAILED] > 0)
        norms = whole[:, _SQUARE].sqrt()
        self._skip[rows] = skip
        later, index = divmod(entry, len(self.buckets))
        self._updates[index].update(self._starts[index], later, norms, skip)
        for i, name in self._acting[index] if self._counts else ():
            adapter = self.tasks[name].adapter
            adapter.after_step(self._first[name] + later + 1, skip[i])
            adapter.arena.refresh()
        self._tables.append((entry, whole[:, :read]))
        return whole

    def finish(self) -> list[dict[str, StepResult]]:
        """For each step, what it gave each task, up to its failure; counts what the tasks have done."""
        results: list[dict[str, StepResult]] = [{} for _ in self.tokens]
        if not self._tables:
            return results
        values = iter(torch.cat([table.flatten() for _, table in self._tables]).tolist())
        for entry, _ in self._tables:
            step = self.step(entry)
            bucket = entry % len(self.buckets)
            columns, more = self._read(entry), self._summed(entry) - _BALANCING
            for name in self.bucket(entry).tasks:
                loss, square, failed, *others = islice(values, columns)
                if failed:
                    self.out_of_memory.add(bucket)
                if bucket in self.out_of_memory:
                    continue
                metrics = self.preferences.metrics(step, name, others[more:])
                norm, tokens = math.sqrt(square), self.tokens[step][name]
                result = self._result(name, loss, norm, tokens, metrics, *others[:more])
                if result is not None:
                    results[step][name] = result
        for task in self.tasks.values():
            task.adapter.rollback_after(task.step)
        return results

    def _result(
        self,
        name: str,
        loss: float,
        norm: float,
        tokens: int,
        metrics: Mapping[str, float],
        balancing: float = 0.0,
    ) -> StepResult | None:
        """What one step gave a task; None if the task failed in a step before."""
        task = self.tasks[name]
        if task.status == "failed":
            return None
        rate = task.optimizer.learning_rate(task.step)
        reason = ""
        if not math.isfinite(loss):
            reason = f"its loss was {loss} at step {task.step + 1}"
        elif not math.isfinite(norm):
            reason = f"its gradient norm was {norm} at step {task.step + 1}"
        elif not math.isfinite(balancing):
            reason = f"its balancing loss was {balancing} at step {task.step + 1}"
        if reason:
            task.status = "failed"
        else:
            task.step += 1
            if task.step >= task.total_steps:
                task.status = "finished"
        coefficient = self.coefficients.get(name)
        router_aux_loss = None if coefficient is None else balancing / coefficient
        return StepResult(
            step=task.step,
            total_steps=task.total_steps,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            status=task.status,
            reason=reason,
            diverged=bool(reason),
            router_aux_loss=router_aux_loss,
            metrics=metrics,
        )
