"""The ends of buckets' steps on one stage: gradients made whole, tasks' norms summed over stages, optimizer steps.

Clipping needs the norm of a task's gradient over all stages, and whether its loss is finite is known on the last alone.
Both travel to the first stage with the buckets' last gradients and back with their next hidden states
(`pipeline.rolling`), as a table of fp64: a row per task of the bucket with its loss, its squared norm, and on how many
ranks it lacked memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.engine.optimize import reduce_gradients, squared_norm, summed_at_once
from megatron_mux.engine.out_of_memory import Shortage
from megatron_mux.engine.room import Room
from megatron_mux.engine.task_state import StepResult, TaskState
from megatron_mux.fusion.plan import Bucket
from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

_SQUARE, _LACK, LOSS_SQUARE_LACK = 1, 2, 3


class BucketFinalizer:
    """The ends of the buckets of one or several steps.

    Args:
        running: The tasks.
        buckets: Of a step.
        tokens: For each step, tokens of each task's batch.
        parallel: Where this rank stands.
        shortage: What lacks memory here.
        room: Has memory to sum gradients of all these tasks in.

    Attributes:
        lacking: Once finished, the buckets of a step whose tasks did not step for want of memory on some rank.
    """

    def __init__(
        self,
        running: Mapping[str, TaskState],
        buckets: Sequence[Bucket],
        tokens: Sequence[Mapping[str, int]],
        parallel: Parallel,
        shortage: Shortage,
        room: Room,
    ) -> None:
        self.running = running
        self.shortage = shortage
        self.lacking: set[int] = set()
        self.buckets = buckets
        self.tokens = tokens
        self.parallel = parallel
        self._first = {name: task.step for name, task in running.items()}
        self._order = {name: i for i, name in enumerate(running)}
        self._whole: dict[int, Tensor] = {}
        # Read on the host once all steps are launched: until then nothing waits for the device.
        self._tables: list[tuple[int, Tensor]] = []
        self._failed = torch.zeros(len(running), dtype=torch.bool, device=parallel.device)
        rows = ([self._order[name] for name in bucket.tasks] for bucket in buckets)
        self._rows = [torch.tensor(own, device=parallel.device) for own in rows]
        self._room = room
        parameters = [p for task in running.values() for p in task.adapter.parameters]
        self._summed_at_once = summed_at_once(parameters, parallel)

    def bucket(self, entry: int) -> Bucket:
        """A bucket, counted on over steps."""
        return self.buckets[entry % len(self.buckets)]

    def norm(self, action: Action, losses: Tensor, others: Tensor | None) -> Tensor:
        """Make a bucket's gradients whole here, and add up.

        Args:
            action: It ends a bucket's step.
            losses: `[tasks]` fp64 of the step, on the last stage: of this pipeline's sequences.
            others: The table of the stages after this one; None on the last.

        Returns:
            The table of this stage and those after it. With tensor parallelism, squares of this rank's own parts.
        """
        entry = action.bucket
        names, device = self.bucket(entry).tasks, self.parallel.device
        # All that takes memory comes before the pipelines' sum, which tells them all who lacked it.
        if not self.shortage.concerns(entry):
            self.shortage.attempt(action, lambda: self._complete(names, entry // len(self.buckets)))
        # Read at the first stage of each pipeline, but true of all pipelines: as the gradients are.
        lacks = self._room.surely(
            lambda: torch.full((len(names),), float(self.shortage.concerns(entry)), device=device)
        )
        parameters = [self.running[name].adapter.parameters for name in names]
        reduce_gradients(
            [p for own in parameters for p in own], self.parallel, lacks, self._room, self._summed_at_once
        )
        squares = self._room.surely(lambda: torch.stack([squared_norm(own, device) for own in parameters]))
        if others is None:
            # Each tensor rank of the last stage has the whole loss of its pipeline.
            own = self._room.surely(lambda: losses[self._rows[entry % len(self.buckets)]])
            if self.parallel.dp_size > 1:
                dist.all_reduce(own, group=self.parallel.dp_group)
            table = self._room.surely(lambda: torch.stack([own, squares, lacks.double()], dim=1))
        else:
            table = others
            table[:, _SQUARE] += squares
            table[:, _LACK] += self._room.surely(lacks.double)
        if self.parallel.is_first_stage:
            self._whole[entry] = table
        return table

    def _complete(self, names: Sequence[str], step: int) -> None:
        """Make gradients that are missing zero, and add what is no loss of any sequence: on the first pipeline alone,
        since pipelines are summed.
        """
        for name in names:
            adapter = self.running[name].adapter
            for p in adapter.parameters:
                if p.value.grad is None:
                    p.value.grad = torch.zeros_like(p.value)
            if self.parallel.dp_rank == 0:
                adapter.penalty(self._first[name] + step)

    def update(self, entry: int, whole: Tensor | None) -> Tensor:
        """Let the tasks of a bucket step here, but those that failed or lacked memory, now or before.

        Args:
            entry: The bucket, counted on over steps.
            whole: The table over all stages and tensor ranks; None on the first stage, which makes it.

        Returns:
            The table.
        """
        if whole is None:
            whole = self._whole.pop(entry)
            if self.parallel.tp_size > 1:
                own = self._room.surely(whole[:, _SQUARE:].clone)
                dist.all_reduce(own, group=self.parallel.tp_group)
                whole[:, _SQUARE:] = own
        names = self.bucket(entry).tasks
        rows = self._rows[entry % len(self.buckets)]
        failed, norms = self._room.surely(lambda: self._judged(whole, rows))
        self._failed[rows] = failed
        for i, name in enumerate(names):
            self._step(name, self._first[name] + entry // len(self.buckets), norms[i], failed[i])
        self._tables.append((entry, whole))
        return whole

    def _judged(self, whole: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which tasks of a table have failed or lacked memory, now or before; their norms."""
        failed = self._failed[rows] | ~torch.isfinite(whole).all(dim=1) | (whole[:, _LACK] > 0)
        return failed, whole[:, _SQUARE].sqrt()

    def _step(self, name: str, step: int, norm: Tensor, failed: Tensor) -> None:
        """Let one task's optimizer take step `step`, unless the task has failed; the host need not know."""
        running = self.running[name]
        self._room.surely(lambda: running.optimizer.clip(norm))
        running.optimizer.step(step, self._room.surely(failed.float))
        # What acts on the adapter besides its optimizer has to know.
        if running.adapter.spec.acts_after_steps and not failed:
            running.adapter.after_step(step + 1)

    def finish(self) -> list[dict[str, StepResult]]:
        """For each step, what it gave each task, up to its failure; counts what the tasks have done."""
        results: list[dict[str, StepResult]] = [{} for _ in self.tokens]
        if not self._tables:
            return results
        values = iter(torch.cat([table for _, table in self._tables]).tolist())
        for entry, _ in self._tables:
            step = entry // len(self.buckets)
            bucket = entry % len(self.buckets)
            for name, (loss, square, lack) in zip(self.bucket(entry).tasks, values, strict=False):
                if lack:
                    self.lacking.add(bucket)
                if bucket in self.lacking:
                    continue
                result = self._result(name, loss, math.sqrt(square), self.tokens[step][name])
                if result is not None:
                    results[step][name] = result
        return results

    def _result(self, name: str, loss: float, norm: float, tokens: int) -> StepResult | None:
        """What one step gave a task; None if the task was stopped in a step before."""
        running = self.running[name]
        if running.status == "failed":
            return None
        rate = running.optimizer.learning_rate(running.step)
        reason = ""
        if not math.isfinite(loss):
            reason = f"its loss was {loss} at step {running.step + 1}"
        elif not math.isfinite(norm):
            reason = f"its gradient norm was {norm} at step {running.step + 1}"
        if reason:
            running.status = "failed"
        else:
            running.step += 1
            if running.step >= running.total_steps:
                running.status = "finished"
        return StepResult(
            running.step, running.total_steps, loss, norm, rate, tokens, running.status, reason, bool(reason)
        )
