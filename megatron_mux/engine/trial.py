"""Trials: whether a plan fits into this rank's memory, found out before one of its steps counts.

For each bucket a trial runs the fullest moment of the plan's actions on this rank alone: the forward passes whose
outputs are kept when most rows are, the last of them the bucket's, then the bucket's backward passes and the end of its
step, at which no task steps. Communication is local (`local_collectives`), so a rank that runs out of memory leaves
nobody waiting. Adapters, optimizers and gradients are as before afterwards. Ranks then agree, and the plan gets smaller
or a task is parked.

Plans that have fitted are remembered: one is tried again for steps that keep more rows or have more labels in a pass.
Where a pass recovers from running out of memory, only if so many more that the GPU might not have the room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_mux import runtime
from megatron_mux.attributes import replaced_in
from megatron_mux.backbone.experts.layer import MoELayer, unobserved
from megatron_mux.engine.out_of_memory import FailedBuckets, Stages, ranks_meet
from megatron_mux.engine.train_step import TrainStep
from megatron_mux.fusion.plan import Plan
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.transfers import transfers_to
from megatron_mux.runtime import Parallel

Size = tuple[int, ...]
"""For each bucket, rows kept at its fullest moment plus the last pass's own rows; then the same plus its labels."""

_SHARE = 0.9
"""Of a GPU's memory, what steps larger than those tried may fill by estimate."""

_INPUTS = ("allreduce_", "broadcast_", "send")
"""Operators whose first argument stays as it is; that of the others is what they receive."""


def fullest_moments(
    actions: Sequence[Action],
    rows: Callable[[ChunkId], int],
    computed: Callable[[ChunkId], int],
    buckets: int,
) -> tuple[list[list[Action]], Size]:
    """For each bucket, the forward passes whose outputs are kept at its fullest moment, in their order; and the size.

    Args:
        actions: A rank's, in order.
        rows: Returns the rows that are kept of a chunk.
        computed: Returns what the last pass needs memory for besides: its rows, or its labels.
        buckets: Of a step.
    """
    kept: dict[Action, int] = {}
    moments: list[list[Action]] = [[] for _ in range(buckets)]
    size = [0] * buckets
    total = 0
    for action in actions:
        if action.kind == "F":
            kept_rows = kept[action] = rows(action.chunk_id)
            total += kept_rows
            bucket = action.bucket % buckets
            if kept_rows and (most := total + computed(action.chunk_id)) > size[bucket]:
                moments[bucket], size[bucket] = list(kept), most
        elif action.kind == "B":
            total -= kept.pop(Action.of(action.stage, "F", action.chunk_id))
    return moments, tuple(size)


def actions_of_trial(passes: Sequence[Action], rank: int) -> list[Action]:
    """Forward passes, the backward passes of the last one's bucket, the end of its step; then the others' backward."""
    bucket = passes[-1].bucket
    backward = [Action.of(action.stage, "B", action.chunk_id) for action in reversed(passes)]
    backward_of_bucket = [action for action in backward if action.bucket == bucket]
    others = [action for action in backward if action.bucket != bucket]
    return [*passes, *backward_of_bucket, Action(rank, "N", bucket), Action(rank, "U", bucket), *others]


class Trials:
    """Tries plans and evaluations on this rank, and remembers what has fitted.

    Args:
        stages: This rank's.
        parallel: Where this rank stands.
        communicator: This rank's transfers.

    Attributes:
        evaluated: The most rows, and the most labels, of evaluation passes that have fitted.
    """

    def __init__(self, stages: Stages, parallel: Parallel, communicator: Communicator) -> None:
        self.evaluated = (0, 0)
        self._stages = stages
        self._parallel = parallel
        self._communicator = communicator
        self._fitted: deque[tuple[Plan, Size]] = deque(maxlen=32)

    def forget(self) -> None:
        """Forget what has fitted: from now on there may be less memory."""
        self._fitted.clear()
        self.evaluated = (0, 0)

    def failures(
        self,
        plan: Plan,
        actions: Sequence[Action],
        rows: Callable[[ChunkId], int],
        labels: Callable[[ChunkId], int],
        make: Callable[[FailedBuckets], TrainStep],
    ) -> dict[int, str]:
        """Try a plan unless steps as large have fitted. Every rank calls it before it runs `actions`.

        Args:
            actions: This rank's.
            rows, labels: Return the number of rows, and of labels, of a chunk.
            make: Makes what computes the actions, with micro-batches of its own.

        Returns:
            The buckets that ran out of memory on some rank, where and why: the same on every rank.
        """
        failed = FailedBuckets(len(plan.buckets), self._stages.values(), self._parallel, recovers=False)
        moments, size = fullest_moments(actions, rows, rows, len(plan.buckets))
        others, more = fullest_moments(actions, rows, labels, len(plan.buckets))
        moments += [passes for passes in others if passes not in moments]
        size += more
        if not any(plan == other and _covers(tried, size) for other, tried in self._fitted):
            for passes in filter(None, moments):
                failed.at = passes[-1]
                of_trial = actions_of_trial(passes, self._parallel.pp_rank)
                later = actions[actions.index(passes[-1]) + 1 :]  # received ahead of their use
                expected = [*of_trial, *(action for action in later if action.kind == "F")]
                self.run(failed, partial(self._step, plan, of_trial, expected, failed, make))
            if not failed:
                growth = self._growth()
                self._fitted.append((plan, tuple(int(rows_of_bucket * growth) for rows_of_bucket in size)))
        return failed.everywhere() if self._parallel.total([bool(failed)])[0] else {}

    def run(self, failed: FailedBuckets, actions: Callable[[], None]) -> None:
        """Run actions on this rank alone; `failed` notes if they run out of memory."""
        try:
            with local_collectives(), _unobserved(self._stages):
                actions()
        except torch.OutOfMemoryError as error:
            failed.note(failed.at, error)
        # Outside the handler, whose traceback keeps the tensors of the actions.
        self._communicator.finish()
        if failed:
            failed.free()
        for stage in self._stages.values():
            stage.offload.abandon()  # what was brought ahead holds no weights

    def _growth(self) -> float:
        """How many times as large as the last trial steps may be without one of their own.

        Without this, steps of random lengths would be tried whenever one is the largest so far. What a pass needs grows
        by the square of its rows at most, beside the most that this process has held so far. All are tried where a pass
        without memory would end the run.
        """
        memory = runtime.held_and_allowed_memory(self._parallel.device)
        if memory is None or ranks_meet(self._stages.values(), self._parallel):
            return 1.0
        return max(1.0, math.sqrt(_SHARE * memory[1] / memory[0]))

    def _step(
        self,
        plan: Plan,
        actions: Sequence[Action],
        expected: Sequence[Action],
        failed: FailedBuckets,
        make: Callable[[FailedBuckets], TrainStep],
    ) -> None:
        """Run a trial's own actions while what `expected` needs is received; gradients are as before afterwards."""
        compute = make(failed)
        compute.finalizer.skip_all()
        ranks, rank = self._parallel.pp_size, self._parallel.pp_rank
        template = tuple(tuple(actions) if other == rank else () for other in range(ranks))
        given = transfers_to(expected, plan.stages, ranks)
        dtype = next(iter(self._stages.values())).dtype
        try:
            execute(template, rank, compute, self._communicator, dtype, stages=plan.stages, given=given)
        finally:
            for task in compute.finalizer.burst.tasks.values():  # between steps, gradients are zero
                task.optimizer.zero()


def _unobserved(stages: Stages) -> AbstractContextManager[None]:
    """Context in which nobody looks at the routes of experts: a trial's rows do not count."""
    layers = [m for stage in stages.values() for m in stage.model.modules() if isinstance(m, MoELayer)]
    return replaced_in(layers, "observe", unobserved)


def _covers(tried: Size, size: Size) -> bool:
    """Whether steps of a size fit if those of another one did."""
    return all(tried_size >= other for tried_size, other in zip(tried, size, strict=True))


@contextmanager
def local_collectives() -> Iterator[None]:
    """Run Megatron-Core's and our communication on this rank alone; nothing is exchanged.

    A sum leaves its tensor as it is, and what is gathered or received is zeros: memory and shapes are those of the real
    operation, values are not. Backward passes run on this thread, so that it holds for their collectives too.
    """
    with torch.autograd.set_multithreading_enabled(False), _LocalCollectives():
        yield


class _LocalCollectives(TorchDispatchMode):
    """Intercepts `c10d` operators: every operation of `torch.distributed` becomes one, whoever calls it.

    Those of `symm_mem` return what they write to, their input or their last argument.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "symm_mem":
            return args[0] if func._schema.name.endswith("_") else args[-1].zero_()
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("c10d::") not in _INPUTS:
            for output in tree_leaves(args[0]):
                if isinstance(output, Tensor):
                    output.zero_()
        work = torch._C._distributed_c10d.FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work
