"""Memory that runs out in a pass: the bucket's tasks take their step again in smaller parts, nobody else loses one.

A pass that finds no memory gives its neighbours zeros instead, and so do the bucket's later passes on this rank; with
ranks that make the same passes they go on exchanging what these wait for (`messages`). All others run as planned, so
that no rank waits and no other task notices. That the bucket lacked memory travels to all stages with its tasks' norms
(`ends`): they do not step, nor in what is left of the turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.engine.messages import Counts, Messages
from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

T = TypeVar("T")

Passes = tuple[Callable[[], Tensor]] | tuple[Callable[[], Tensor], Callable[[Tensor], None]]
"""A forward pass; or one, and its backward pass: as `Messages.alone` takes them."""


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
        self._not_alone: set[int] = set()

    def concerns(self, entry: int) -> bool:
        """Whether a bucket, counted on over steps, is not to be computed any more in this turn."""
        return entry % self._period in self._said

    def attempt(
        self, action: Action, compute: Callable[[], T], again: Callable[[], Passes] | None = None
    ) -> T | None:
        """What an action's work comes to; None if its bucket lacks memory: then all that it took is free again.

        Args:
            action: The action.
            compute: Does its work.
            again: Gives the same work for its messages alone. None: it exchanges nothing.
        """
        before = self._messages.sent()
        bucket = action.bucket % self._period
        fits = bucket in self._said and bucket not in self._not_alone
        if bucket not in self._said:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                self._said[bucket] = f"rank {self._parallel.rank} at {action}: {first_sentence(error)}"
            # Outside the handler, and of any context manager, whose frames would be kept: the work's tensors are gone.
            self._free()
        if again is None or not self._messages.any or (fits and self._computed_alone(bucket, before, again)):
            return None
        self._messages.alone(before, *again(), memory=False)
        return None

    def _computed_alone(self, bucket: int, before: Counts, again: Callable[[], Passes]) -> bool:
        """Exchange a pass's messages by computing it; whether there is memory, now that no other of its bucket has any.

        Once there is none it is not tried again. (It is tried because it is quick: without memory each operator takes a
        fraction of a millisecond of the host.)
        """
        try:
            self._messages.alone(before, *again(), memory=True)
            return True
        except torch.OutOfMemoryError:
            self._not_alone.add(bucket)
        self._free()
        return False

    def _free(self) -> None:
        self._messages.abandon()
        if self._parallel.device.type == "cuda":
            torch.cuda.empty_cache()

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
