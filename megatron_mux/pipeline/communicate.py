"""Hidden states and their gradients between neighbouring stages, with shapes both sides know beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.liveness import Heartbeat
from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

_AHEAD = 2
"""Receives that are posted before they are needed: a tensor then travels while its receiver computes."""


@dataclass(frozen=True)
class Message:
    """What an action needs from a neighbouring stage.

    Attributes:
        action: The action that needs it.
        shape, dtype: Of the tensor.
    """

    action: Action
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Link:
    """One way between two neighbours.

    Attributes:
        group: The process group of its transfers.
        tag: Theirs, where a group is shared.
    """

    group: dist.ProcessGroup | None
    tag: int = 0


class Inbox:
    """What one neighbour will send: receives are posted in the order of its sends, some ahead of their use.

    Args:
        peer: Global rank of the neighbour.
        link: The way from there.
        device: Where received tensors are allocated.
        messages: All that it will send, in its order; asked for a message at a time.
    """

    def __init__(self, peer: int, link: Link, device: torch.device, messages: Iterable[Message]) -> None:
        self.peer = peer
        self.link = link
        self.device = device
        self._coming = iter(messages)
        self._posted: deque[tuple[Action, dist.Work | None, Tensor]] = deque()
        # With several stages to a rank, what was sent before it is needed.
        self._early: dict[Action, Tensor] = {}

    def post(self) -> None:
        """Ask for the next messages, so that they may arrive while this stage computes."""
        while len(self._posted) < _AHEAD and (message := next(self._coming, None)) is not None:
            buffer = torch.empty(message.shape, dtype=message.dtype, device=self.device)
            work = None
            if buffer.numel():  # what is empty does not travel: both sides know
                work = dist.irecv(buffer, self.peer, group=self.link.group, tag=self.link.tag)
            self._posted.append((message.action, work, buffer))

    def take(self, action: Action) -> Tensor:
        """What `action` needs; waits for it.

        Raises:
            RuntimeError: The neighbour sends no such thing.
        """
        while action not in self._early:
            self.post()
            if not self._posted:
                raise RuntimeError(f"{action} is to run, but the neighbour has nothing more for it")
            due, work, buffer = self._posted.popleft()
            self.post()
            if work is not None:
                work.wait()
            self._early[due] = buffer
        return self._early.pop(action)


class Communicator:
    """Point-to-point transfers of one rank of a pipeline: asynchronous both ways.

    Ranks form a ring: with several stages to a rank, what leaves the last rank forward goes to the first. Each way
    between two neighbours is a link of its own, so that on NCCL (which matches operations in issue order within a
    communicator) no transfer waits behind one that its neighbour issues later.

    Args:
        previous, following: Global ranks of the neighbours in the ring.
        from_previous, to_following: Links of hidden states.
        from_following, to_previous: Links of gradients.
        device: Where received tensors are allocated.
        ranks: Of the pipeline: bounds how many sent tensors are kept alive.
        heartbeat: Hears which action this process is at.
    """

    def __init__(
        self,
        previous: int,
        following: int,
        from_previous: Link,
        to_following: Link,
        from_following: Link,
        to_previous: Link,
        device: torch.device,
        ranks: int,
        heartbeat: Heartbeat,
    ) -> None:
        self.device = device
        self.heartbeat = heartbeat
        self._inward = {False: (previous, from_previous), True: (following, from_following)}
        self._outward = {False: (following, to_following), True: (previous, to_previous)}
        # A send's tensor must outlive it, and gloo completes a send only when it is waited for. Waiting for a send that
        # is more than a pipeline's depth old holds nobody up: its receiver has long asked for it, or asks next.
        self._pending: dict[bool, deque[tuple[dist.Work, Tensor]]] = {False: deque(), True: deque()}
        self._most = 2 * (ranks + 1)
        self._least = self._most

    @classmethod
    def between_stages(cls, parallel: Parallel) -> Self:
        """The transfers of this rank. Every rank calls it (NCCL needs groups for its links)."""
        ring = dist.get_process_group_ranks(parallel.pp_group)
        rank, ranks = parallel.pp_rank, parallel.pp_size
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        links = _links(parallel, ring)
        return cls(
            ring[before],
            ring[after],
            links[False, ring[before]],
            links[False, ring[rank]],
            links[True, ring[after]],
            links[True, ring[rank]],
            parallel.device,
            ranks,
            parallel.heartbeat,
        )

    def expect(self, in_flight: int) -> None:
        """Prepare for a template that has so many units in flight on some rank, or buckets between two of its steps.

        Neighbours never lag further behind each other than that, so older sends are done and waiting is not waiting.
        """
        self._most = max(self._least, in_flight + 1)

    def inbox(self, messages: Iterable[Message], backward: bool) -> Inbox:
        """Of what the neighbour on one side will send.

        Args:
            messages: In the neighbour's order.
            backward: From the rank after this one, else from the one before.
        """
        peer, link = self._inward[backward]
        return Inbox(peer, link, self.device, messages)

    def send(self, tensor: Tensor, backward: bool) -> None:
        """Hand a tensor to the rank before this one (`backward`) or to the one after it; nothing if it is empty."""
        if not tensor.numel():
            return
        peer, link = self._outward[backward]
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=link.group, tag=link.tag)
        if work is not None:
            pending = self._pending[backward]
            pending.append((work, tensor))
            while len(pending) > self._most:
                pending.popleft()[0].wait()

    def finish(self) -> None:
        """Wait for every send."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()


def _links(parallel: Parallel, ring: list[int]) -> dict[tuple[bool, int], Link]:
    """The links of a pipeline by direction (backward?) and the rank they begin at."""
    if parallel.device.type != "cuda" or len(ring) == 1:
        # gloo tells messages between two ranks apart by their tags.
        return {
            (backward, rank): Link(parallel.pp_group, int(backward))
            for backward in (False, True)
            for rank in ring
        }
    rings: list[list[int]] = [[] for _ in range(parallel.world_size)]
    dist.all_gather_object(rings, ring)
    found = {}
    for ranks in sorted({tuple(ranks) for ranks in rings}):
        for backward in (False, True):
            for i, rank in enumerate(ranks):
                pair = sorted((rank, ranks[(i + (-1 if backward else 1)) % len(ranks)]))
                group = dist.new_group(pair)  # every rank makes every group, in one order
                if list(ranks) == ring:
                    found[backward, rank] = Link(group)
    return found
