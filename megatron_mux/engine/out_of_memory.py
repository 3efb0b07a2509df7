"""Out of memory in a pass: the tasks of its bucket repeat their step in smaller parts, and no other task loses one.

The pass gives its neighbours zeros instead, and the bucket's later passes on this rank are skipped. All others run as
planned, so that no rank waits and no other task notices. That the bucket ran out of memory travels to all stages with
its tasks' norms (`bucket_finalizer`): they skip their optimizer step, and what is left of the burst.

This needs passes in which no rank meets another one. Where ranks do meet (tensor parallelism, sharded weights), the
error ends the run on all of them (`liveness`). On GPUs plans are tried before they are followed (`trial`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine.agreement import everyones
from megatron_mux.errors import failed_allocation
from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

T = TypeVar("T")

Stages = Mapping[int, Backbone]
"""A rank's stages by their number."""


def ranks_meet(stages: Iterable[Backbone], parallel: Parallel) -> bool:
    """Whether a pass of these stages contains collectives, so that no rank can leave one out."""
    return parallel.tp_size > 1 or any(stage.in_step for stage in stages)


class FailedBuckets:
    """Buckets of a burst that ran out of memory on this rank.

    Args:
        period: Buckets of a step.
        stages: This rank's.
        parallel: Where this rank stands.
        recovers: Whether passes that run out of memory are skipped, else raise; by default unless ranks meet in them.

    Attributes:
        at: The action to blame: the one attempted last.
    """

    def __init__(
        self, period: int, stages: Iterable[Backbone], parallel: Parallel, recovers: bool | None = None
    ) -> None:
        self._period = period
        self._stages = list(stages)
        self._parallel = parallel
        self._reasons: dict[int, str] = {}
        self.at = Action(parallel.pp_rank, "F", 0)
        self.recovers = not ranks_meet(self._stages, parallel) if recovers is None else recovers

    def __bool__(self) -> bool:
        """Whether any bucket has failed."""
        return bool(self._reasons)

    @property
    def reason(self) -> str:
        """Where and why the first bucket failed; empty if none has."""
        return next(iter(self._reasons.values()), "")

    def __contains__(self, bucket: int) -> bool:
        """Whether a bucket, counted on over steps, has failed."""
        return bucket % self._period in self._reasons

    def attempt(self, action: Action, compute: Callable[[], T]) -> T | None:
        """Run an action's work; None if its bucket has failed, now or before: then its memory is free again.

        Raises:
            torch.OutOfMemoryError: It ran out of memory, and is not recovered from.
        """
        self.at = action
        if action.bucket in self:
            return None
        if not self.recovers:
            return compute()
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            self.note(action, error)
        # Outside the handler, whose traceback keeps the work's tensors.
        self.free()
        return None

    def note(self, action: Action, error: torch.OutOfMemoryError) -> None:
        """Count the bucket of an action as failed."""
        reason = f"rank {self._parallel.rank} at {action}: {failed_allocation(error)}"
        self._reasons[action.bucket % self._period] = reason

    def free(self) -> None:
        """Free what a pass that broke off has left: weights that were brought, garbage, the allocator's cache."""
        gc.collect()  # a traceback's frames may hold tensors in cycles
        for stage in self._stages:
            stage.offload.abandon()
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()

    def everywhere(self) -> dict[int, str]:
        """For each bucket that failed on some rank, where and why. Every rank calls it."""
        reasons: dict[int, str] = {}
        for theirs in everyones(self._reasons, self._parallel):
            reasons = theirs | reasons  # the first rank's counts
        return reasons


def zeros_for_next_stage(stages: Stages, rows: int, failed: FailedBuckets) -> Tensor:
    """`[rows, 1, H]` zeros, allocated up front, for the first stage to send in place of an output that failed.

    Other stages overwrite what they received. One row where nothing like that is sent.
    """
    stage = next(iter(stages.values()))
    sends = failed.recovers and 0 in stages and not stages[0].last
    return torch.zeros(rows if sends else 1, 1, stage.shape.hidden, dtype=stage.dtype, device=stage.device)
