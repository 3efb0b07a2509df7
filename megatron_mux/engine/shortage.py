"""Memory that runs out in a pass: the bucket's tasks take their step again in smaller parts, nobody else loses one.

A pass that finds no memory gives its neighbours zeros instead, and so do the bucket's later passes on this rank; what
they exchange with ranks that make the same passes, they exchange without memory (`messages`). All others run as planned,
so that no rank waits and no other task notices. That the bucket lacked memory travels to all stages with its tasks'
norms (`ends`): they do not step, nor in what is left of the turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.engine.messages import Messages
from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

T = TypeVar("T")

Again = tuple[Callable[[], Tensor]] | tuple[Callable[[], Tensor], Callable[[Tensor], None]]
"""See `Shortage.attempt`."""


def first_sentence(error: torch.OutOfMemoryError) -> str:
    """What was asked for; the rest is advice on PyTorch's allocator."""
    return str(error).split(". ")[0].strip()


class Shortage:
    """What lacked memory on this rank in a turn.

    Args:
        period: Buckets of a step.
        parallel: Where this rank stands.
        messages: What passes exchange with ranks that make the same ones.
    """

    def __init__(self, period: int, parallel: Parallel, messages: Messages) -> None:
        self._period = period
        self._parallel = parallel
        self._messages = messages
        self._said: dict[int, str] = {}

    def concerns(self, entry: int) -> bool:
        """Whether a bucket, counted on over steps, is not to be computed any more in this turn."""
        return entry % self._period in self._said

    def attempt(self, action: Action, compute: Callable[[], T], again: Again | None = None) -> T | None:
        """What an action's work comes to; None if its bucket lacks memory: then all that it took is free again.

        Args:
            action: The action.
            compute: Does its work.
            again: The same work, as `Messages.alone` does it: a forward pass, and a backward pass if that is what the
                action makes. None: it exchanges nothing.
        """
        before = self._messages.sent()
        if not self.concerns(action.bucket):
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                what = f"rank {self._parallel.rank} at {action}: {first_sentence(error)}"
                self._said[action.bucket % self._period] = what
            # Outside the handler, and of any context manager, whose frames would be kept: the work's tensors are gone.
            if self._parallel.device.type == "cuda":
                torch.cuda.empty_cache()
        if again is not None:
            self._messages.alone(before, *again)
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
