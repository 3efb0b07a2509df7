"""Memory that runs out in a pass: the bucket's tasks take their step again in smaller parts, nobody else loses one.

A pass that finds no memory gives its neighbours zeros instead, and so do the bucket's later passes on this rank: all
others run as planned, so that no rank waits and no other task notices. That the bucket lacked memory travels to all
stages with its tasks' norms (`ends`): they do not step, nor in what is left of the turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

T = TypeVar("T")


def first_sentence(error: torch.OutOfMemoryError) -> str:
    """What was asked for; the rest is advice on PyTorch's allocator."""
    return str(error).split(". ")[0].strip()


class Shortage:
    """What lacked memory on this rank in a turn.

    Args:
        period: Buckets of a step.
        parallel: Where this rank stands.
        together: Whether a pass takes part in collectives: one that ends early would leave other ranks waiting, so
            its error is not caught. (To go on with zeros in the same collectives, of a rank that fails anywhere in a
            layer, would take a second implementation of every layer's communication.)
    """

    def __init__(self, period: int, parallel: Parallel, together: bool) -> None:
        self._period = period
        self._parallel = parallel
        self._together = together
        self._said: dict[int, str] = {}

    def concerns(self, entry: int) -> bool:
        """Whether a bucket, counted on over steps, is not to be computed any more in this turn."""
        return entry % self._period in self._said

    def attempt(self, action: Action, compute: Callable[[], T]) -> T | None:
        """What an action's work comes to; None if it finds no memory: then all that it took is free again."""
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            if self._together:
                raise
            what = f"rank {self._parallel.rank} at {action}: {first_sentence(error)}"
            self._said[action.bucket % self._period] = what
        # Outside the handler, and of any context manager, whose frames would be kept: the work's tensors are gone.
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def everywhere(self) -> dict[int, str]:
        """For each bucket that lacked memory on some rank, where; every rank calls it when one did."""
        if self._parallel.world_size == 1:
            return self._said
        found: list[dict[int, str]] = [{} for _ in range(self._parallel.world_size)]
        dist.all_gather_object(found, self._said)
        said: dict[int, str] = {}
        for own in found:
            for bucket, what in own.items():
                said.setdefault(bucket, what)
        return said
