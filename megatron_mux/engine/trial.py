"""Trials: whether a plan fits into this rank's memory, found out before one of its steps counts.

A trial runs the fullest moment of the plan's actions on this rank alone: forward passes until as many rows are kept for
backward passes as ever are, one backward pass, then the end of each bucket's step. Collectives become local operations
of the same size (`local_collectives`), so a rank that runs out of memory leaves nobody waiting. Adapters, optimizers
and gradients are as before afterwards. Ranks then agree, and the plan gets smaller or a task is parked.

What has fitted is remembered: a plan is tried again only for steps that keep more rows, or have larger micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mux.engine.evaluation_compute import EvaluationCompute
from megatron_mux.engine.local_collectives import local_collectives
from megatron_mux.engine.out_of_memory import FailedBuckets
from megatron_mux.engine.training_compute import Stages, TrainingCompute
from megatron_mux.fusion.plan import Plan
from megatron_mux.pipeline.action import Action, Unit
from megatron_mux.pipeline.communicate import AHEAD
from megatron_mux.runtime import Parallel


@dataclass(frozen=True)
class Size:
    """What the steps of a plan keep on one rank, in rows.

    Attributes:
        kept: Rows between their forward and backward pass at the fullest moment, those of the last pass counted twice.
        largest: Rows of the largest unit of each bucket.
    """

    kept: int
    largest: tuple[int, ...]

    def covers(self, other: Size) -> bool:
        """Whether steps of the other size fit if those of this size do."""
        pairs = zip(self.largest, other.largest, strict=True)
        return self.kept >= other.kept and all(own >= theirs for own, theirs in pairs)


def fullest(
    actions: Sequence[Action], rows: Callable[[Unit], int], buckets: int
) -> tuple[list[Action], Size]:
    """The forward passes whose outputs are kept at the fullest moment of one rank's actions.

    Args:
        actions: The rank's, in order.
        rows: Of a unit.
        buckets: Of a step.

    Returns:
        The passes in their order, the last to run being the last; and the size of the actions.
    """
    kept: dict[Action, int] = {}
    passes: list[Action] = []
    largest = [0] * buckets
    total = most = 0
    for action in actions:
        if action.kind == "F":
            own = kept[action] = rows(action.unit)
            total += own
            largest[action.bucket % buckets] = max(largest[action.bucket % buckets], own)
            if total + own > most:
                passes, most = list(kept), total + own
        elif action.kind == "B":
            total -= kept.pop(Action.of(action.stage, "F", action.unit))
    return passes, Size(most, tuple(largest))


class Trials:
    """Tries plans and evaluations on this rank, and remembers what has fitted.

    Args:
        stages: This rank's.
        parallel: Where this rank stands.
    """

    def __init__(self, stages: Stages, parallel: Parallel) -> None:
        self._stages = stages
        self._parallel = parallel
        self._fitted: deque[tuple[Plan, Size]] = deque(maxlen=32)
        self._evaluated = 0

    def forget(self) -> None:
        """Forget what has fitted: from here on there is less memory."""
        self._fitted.clear()
        self._evaluated = 0

    def of_plan(
        self,
        plan: Plan,
        actions: Sequence[Action],
        rows: Callable[[Unit], int],
        compute: Callable[[FailedBuckets], TrainingCompute],
    ) -> dict[int, str]:
        """Try a plan unless steps as large have fitted. Every rank calls it before it runs `actions`.

        Args:
            plan: The plan.
            actions: This rank's.
            rows: Of a unit of the actions.
            compute: Makes what runs them, with micro-batches of its own.

        Returns:
            The buckets that ran out of memory on some rank, where and why: the same on every rank, empty if none did.
        """
        failed = FailedBuckets(len(plan.buckets), self._stages.values(), self._parallel, recovers=False)
        passes, size = fullest(actions, rows, len(plan.buckets))
        if passes and not any(plan == other and tried.covers(size) for other, tried in self._fitted):
            self._parallel.heartbeat.at("trying the plan", long=True)
            trial = _PlanTrial(plan, passes, self._parallel)
            if self._fits(failed, trial.at, lambda: trial.run(compute(failed))):
                self._fitted.append((plan, size))
        if not self._parallel.total([bool(failed)])[0]:
            return {}
        return failed.everywhere()

    def of_evaluation(
        self, rows: Sequence[int], compute: Callable[[FailedBuckets], EvaluationCompute]
    ) -> FailedBuckets:
        """Try the largest pass of an evaluation unless one as large has fitted.

        Args:
            rows: Of each pass.
            compute: Makes what runs them.

        Returns:
            Whether bucket 0 ran out of memory on this rank.
        """
        failed = FailedBuckets(1, self._stages.values(), self._parallel, recovers=False)
        largest = max(rows, default=0)
        passes = [Action(stage, "F", 0, rows.index(largest)) for stage in self._stages] if largest else []
        if largest > self._evaluated and self._fits(
            failed, passes, lambda: _forwards(compute(failed), passes)
        ):
            self._evaluated = largest
        return failed

    def _fits(self, failed: FailedBuckets, at: Sequence[Action], run: Callable[[], None]) -> bool:
        """Run a trial; whether there was memory. `at` ends with the pass to blame."""
        try:
            with local_collectives():
                run()
        except torch.OutOfMemoryError as error:
            failed.note(at[-1], error)
        # Outside the handler, whose traceback keeps the trial's tensors.
        if failed:
            failed.free()
            return False
        for stage in self._stages.values():
            stage.residence.abandon()  # what was brought ahead holds no weights
        return True


def _forwards(compute: EvaluationCompute, passes: Sequence[Action]) -> None:
    for action in passes:
        compute.forward(action, _received(compute.stages, compute.shape(action), action, False))


def _received(stages: Stages, shape: tuple[int, ...], action: Action, trained: bool) -> Tensor | None:
    """In place of what the stage before would have sent."""
    if action.stage == 0:
        return None
    stage = stages[action.stage]
    return torch.zeros(shape, dtype=stage.dtype, device=stage.device, requires_grad=trained)


class _PlanTrial:
    """One trial of a plan.

    Args:
        plan: The plan.
        passes: Forward passes whose outputs are kept at the same time.
        parallel: Where this rank stands.

    Attributes:
        at: Actions begun so far.
    """

    def __init__(self, plan: Plan, passes: Sequence[Action], parallel: Parallel) -> None:
        self.at: list[Action] = [passes[0]]
        self._plan = plan
        self._passes = passes
        self._parallel = parallel

    def run(self, compute: TrainingCompute) -> None:
        """Run it; gradients are as before afterwards.

        Raises:
            torch.OutOfMemoryError: It does not fit.
        """
        compute.finalizer.skip_all()
        parameters = [p.value for task in compute.finalizer.tasks.values() for p in task.adapter.parameters]
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:  # at the fullest moment all of them may be there
                parameter.grad = torch.zeros_like(parameter)
            self._passes_and_ends(compute)
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _passes_and_ends(self, compute: TrainingCompute) -> None:
        kept: dict[Action, Tensor] = {}
        for action in self._passes:
            self.at.append(action)
            hidden = _received(compute.stages, compute.shape(action), action, True)
            kept[action] = compute.forward(action, hidden)
        last = self._passes[-1]
        # What neighbours send is received ahead of its use, both ways.
        ahead = 2 * AHEAD * (self._plan.stages > 1)
        received = [_received(compute.stages, compute.shape(last), last, False) for _ in range(ahead)]
        self._backward(compute, last, kept.pop(last))
        del received
        for bucket in range(len(self._plan.buckets)):
            for action in [action for action in kept if action.bucket % len(self._plan.buckets) == bucket]:
                compute.drop(action)
                del kept[action]
            self._finish(compute, bucket)

    def _backward(self, compute: TrainingCompute, forward: Action, output: Tensor) -> None:
        action = Action.of(forward.stage, "B", forward.unit)
        self.at.append(action)
        compute.backward(
            action, output, None if compute.stages[forward.stage].last else torch.zeros_like(output)
        )

    def _finish(self, compute: TrainingCompute, bucket: int) -> None:
        """The end of a bucket's step; no task steps."""
        first, last = self._parallel.is_first_stage, self._parallel.is_last_stage
        norm, update = (Action(self._parallel.pp_rank, kind, bucket) for kind in ("N", "U"))
        self.at.append(norm)
        shape, device = compute.shape(norm), self._parallel.device
        others = None if last else torch.zeros(shape, dtype=torch.float64, device=device)
        compute.norm(norm, others)
        self.at.append(update)
        whole = None if first else torch.zeros(shape, dtype=torch.float64, device=device)
        compute.update(update, whole)
