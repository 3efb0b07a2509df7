"""Point-to-point transfers of hidden states and gradients between neighbouring stages, without shape exchange."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.pipeline.action import Action
from megatron_mux.runtime import Parallel

AHEAD = 2
"""Number of receives posted ahead of their use, so that a tensor travels while its receiver computes."""


@dataclass(frozen=True)
class Message:
    """A tensor that a neighbouring stage sends.

    Attributes:
        action: The action that needs it.
        shape, dtype: Shape and dtype of the tensor.
    """

    action: Action
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Link:
    """One direction between two neighbours.

    Attributes:
        group: The process group of the transfers.
        tag: Tag that tells them apart where several links share a group.
    """

    group: dist.ProcessGroup | None
    tag: int = 0


class Inbox:
    """Receives from one neighbour, posted in the order of its sends and some ahead of their use.

    Args:
        peer: Global rank of the neighbour.
        link: The link from that neighbour.
        device: Device on which received tensors are allocated.
        messages: Everything it will send, in its order; consumed one message at a time.
    """

    def __init__(self, peer: int, link: Link, device: torch.device, messages: Iterable[Message]) -> None:
        self.peer = peer
        self.link = link
        self.device = device
        self._coming = iter(messages)
        self._posted: deque[tuple[Action, dist.Work | None, Tensor]] = deque()
        # With several stages per rank, tensors that arrive before they are needed.
        self._early: dict[Action, Tensor] = {}

    def post(self) -> None:
        """Post the next receives, so that tensors arrive while this stage computes."""
        while len(self._posted) < AHEAD and (message := next(self._coming, None)) is not None:
            buffer = torch.empty(message.shape, dtype=message.dtype, device=self.device)
            work = None
            if buffer.numel():  # empty tensors are not sent: both sides know the shape
                work = dist.irecv(buffer, self.peer, group=self.link.group, tag=self.link.tag)
            self._posted.append((message.action, work, buffer))

    def take(self, action: Action) -> Tensor:
        """Wait for the tensor that `action` needs and return it.

        Raises:
            RuntimeError: The neighbour does not send one.
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


def sends_kept(ranks: int) -> int:
    """How many sent tensors are kept alive in each direction, in a pipeline with few units in flight."""
    return 2 * (ranks + 1)


class Communicator:
    """Asynchronous point-to-point transfers of one rank of a pipeline.

    Ranks form a ring: with several stages per rank, hidden states leave the last rank for the first. Each direction
    between two neighbours has a link of its own. NCCL matches operations in issue order within a communicator, so no
    transfer waits behind one that the neighbour issues later.

    Every rank must make one, since NCCL links need process groups.

    Args:
        parallel: Where this rank stands.
    """

    def __init__(self, parallel: Parallel) -> None:
        ring = dist.get_process_group_ranks(parallel.pp_group)
        rank, ranks = parallel.pp_rank, parallel.pp_size
        own, before, after = (ring[other % ranks] for other in (rank, rank - 1, rank + 1))
        links = _links(parallel, ring)
        self.device = parallel.device
        self.heartbeat = parallel.heartbeat
        self._inward = {False: (before, links[False, before]), True: (after, links[True, after])}
        self._outward = {False: (after, links[False, own]), True: (before, links[True, own])}
        # A tensor must stay alive until it is sent, and gloo completes a send only when it is waited for. Waiting for a
        # send that is more than a pipeline's depth old blocks nobody: its receiver has posted it, or posts it next.
        self._pending: dict[bool, deque[tuple[dist.Work, Tensor]]] = {False: deque(), True: deque()}
        self._least = self._most = sends_kept(ranks)

    def expect(self, in_flight: int) -> None:
        """Set how many sent tensors are kept alive.

        Neighbours never lag behind each other by more than the units in flight, so older sends are complete and
        waiting for them returns at once.

        Args:
            in_flight: Units in flight on any rank of the template, plus the buckets between two of its steps.
        """
        self._most = max(self._least, in_flight + 1)

    def inbox(self, messages: Iterable[Message], backward: bool) -> Inbox:
        """The inbox for one neighbour.

        Args:
            messages: What it sends, in its order.
            backward: Whether the neighbour is the next rank (which sends gradients); else it is the previous one.
        """
        peer, link = self._inward[backward]
        return Inbox(peer, link, self.device, messages)

    def send(self, tensor: Tensor, backward: bool) -> None:
        """Send a tensor to the previous rank (`backward`) or to the next one; empty tensors are not sent."""
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
        """Wait until every send is complete."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()


def _links(parallel: Parallel, ring: list[int]) -> dict[tuple[bool, int], Link]:
    """The links of a pipeline, keyed by direction (backward?) and the rank they start from."""
    if parallel.device.type != "cuda" or len(ring) == 1:
        # gloo tells messages between two ranks apart by tag.
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
