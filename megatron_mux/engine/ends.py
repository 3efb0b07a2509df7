"""The ends of buckets' steps on one stage: gradients made whole, tasks' norms summed over stages, optimizer steps.

Clipping needs the norm of a task's gradient over all stages, and whether its loss is finite is known on the last alone.
Both travel to the first stage with the buckets' last gradients and back with their next hidden states
(`pipeline.rolling`), as a table of fp64: a row per task of the bucket, its loss and its squared norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.engine.optimize import reduce_gradients, squared_norm
from megatron_mux.engine.running import Running, StepResult
from megatron_mux.fusion.plan import Bucket
from megatron_mux.runtime import Parallel

_LOSS, _SQUARE = 0, 1


class Ends:
    """The ends of the buckets of one or several steps.

    Args:
        running: The tasks.
        buckets: Of a step.
        tokens: For each step, tokens of each task's batch.
        parallel: Where this rank stands.

    Attributes:
        results: For each step, what it gave; filled as optimizers step.
    """

    def __init__(
        self,
        running: Mapping[str, Running],
        buckets: Sequence[Bucket],
        tokens: Sequence[Mapping[str, int]],
        parallel: Parallel,
    ) -> None:
        self.running = running
        self.buckets = buckets
        self.tokens = tokens
        self.parallel = parallel
        self.results: list[dict[str, StepResult]] = [{} for _ in tokens]
        self._order = {name: i for i, name in enumerate(running)}
        self._whole: dict[int, Tensor] = {}

    def bucket(self, entry: int) -> Bucket:
        """A bucket, counted on over steps."""
        return self.buckets[entry % len(self.buckets)]

    def norm(self, entry: int, losses: Tensor, others: Tensor | None) -> Tensor:
        """Make a bucket's gradients whole here, and add up.

        Args:
            entry: The bucket, counted on over steps.
            losses: `[tasks]` fp64 of the step, on the last stage: of this pipeline's sequences.
            others: The table of the stages after this one; None on the last.

        Returns:
            The table of this stage and those after it. With tensor parallelism, squares of this rank's own parts.
        """
        names = self.bucket(entry).tasks
        parameters = [self.running[name].adapter.parameters for name in names]
        reduce_gradients([p for own in parameters for p in own], self.parallel)
        for name in names:
            self.running[name].adapter.penalty(self.running[name].step)
        squares = torch.stack([squared_norm(own, self.parallel.device) for own in parameters])
        if others is None:
            # Each tensor rank of the last stage has the whole loss of its pipeline.
            losses = losses[[self._order[name] for name in names]]
            if self.parallel.dp_size > 1:
                dist.all_reduce(losses, group=self.parallel.dp_group)
            table = torch.stack([losses, squares], dim=1)
        else:
            table = others
            table[:, _SQUARE] += squares
        if self.parallel.is_first_stage:
            self._whole[entry] = table
        return table

    def update(self, entry: int, whole: Tensor | None) -> Tensor:
        """Let the tasks of a bucket step here, or stop those whose loss or gradient is not finite.

        Args:
            entry: The bucket, counted on over steps.
            whole: The table over all stages and tensor ranks; None on the first stage, which makes it.

        Returns:
            The table.
        """
        if whole is None:
            whole = self._whole.pop(entry)
            if self.parallel.tp_size > 1:
                squares = whole[:, _SQUARE].clone()
                dist.all_reduce(squares, group=self.parallel.tp_group)
                whole[:, _SQUARE] = squares
        step = entry // len(self.buckets)
        for name, (loss, square) in zip(self.bucket(entry).tasks, whole.tolist(), strict=True):
            result = self._finish(name, loss, math.sqrt(square), self.tokens[step][name])
            if result is not None:
                self.results[step][name] = result
        return whole

    def _finish(self, name: str, loss: float, norm: float, tokens: int) -> StepResult | None:
        """Let one task's optimizer step, or stop the task; None if it was stopped in a step before."""
        running = self.running[name]
        if running.status == "failed":
            running.optimizer.zero()
            return None
        rate = running.optimizer.learning_rate(running.step)
        reason = ""
        if not math.isfinite(loss):
            reason = f"its loss was {loss} at step {running.step + 1}"
        elif not math.isfinite(norm):
            reason = f"its gradient norm was {norm} at step {running.step + 1}"
        if reason:
            running.status = "failed"
            running.optimizer.zero()
        else:
            running.optimizer.clip(norm)
            running.optimizer.step(running.step)
            running.step += 1
            running.adapter.after_step(running.step)
            if running.step >= running.total_steps:
                running.status = "finished"
        return StepResult(
            running.step, running.total_steps, loss, norm, rate, tokens, running.status, reason, bool(reason)
        )
