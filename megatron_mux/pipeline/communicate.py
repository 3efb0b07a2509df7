"""Point-to-point transfers of hidden states and gradients between neighbouring stages, without shape exchange."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.pipeline.transfers import sends_kept
from megatron_mux.process_groups import pair_groups
from megatron_mux.runtime import Parallel


@dataclass(frozen=True)
class Link:
    """One direction between two neighbours.

    Attributes:
        group: The process group of the transfers.
        tag: Tag that tells them apart where several links share a group.
    """

    group: dist.ProcessGroup
    tag: int = 0


@dataclass
class PendingReceive:
    """A tensor that is being received.

    Attributes:
        tensor: Where to; undefined until `wait`.
        work: The transfer; None if there is nothing to transfer.
    """

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """The tensor, for computations that are enqueued from now on."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Communicator:
    """Asynchronous point-to-point transfers of one rank of a pipeline.

    Each direction between two neighbours has a link of its own: NCCL matches operations in issue order within a
    communicator, and a transfer never waits behind one in the other direction. When each transfer may be issued is not
    decided here, but by `pipeline.transfers`.

    All ranks of a pipeline make theirs together: with NCCL, neighbours connect.

    Args:
        closes_ring: Whether the last rank is also a neighbour of the first: with several stages to a rank.
    """

    def __init__(self, parallel: Parallel, closes_ring: bool = False) -> None:
        self.parallel = parallel
        self.device = parallel.device
        self.heartbeat = parallel.heartbeat
        self._ring = parallel.pipeline_ranks
        self._links = _links(parallel, self._ring, closes_ring)
        # A tensor must stay alive until it is sent.
        self._pending: dict[bool, deque[tuple[dist.Work, Tensor]]] = {False: deque(), True: deque()}
        self._most = sends_kept(parallel.pp_size)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, backward: bool) -> PendingReceive:
        """Issue a receive from the next rank (`backward`: it sends gradients) or the previous one.

        Args:
            shape, dtype: Those of the tensor. Empty tensors are not transferred.
            backward: See above.
        """
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if not tensor.numel():
            return PendingReceive(tensor)
        peer, link = self._end(1 if backward else -1, backward)
        return PendingReceive(tensor, dist.irecv(tensor, peer, group=link.group, tag=link.tag))

    def send(self, tensor: Tensor, backward: bool) -> None:
        """Issue a send to the previous rank (`backward`) or to the next one; empty tensors are not transferred."""
        if not tensor.numel():
            return
        peer, link = self._end(-1 if backward else 1, backward)
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=link.group, tag=link.tag)
        if work is not None:
            pending = self._pending[backward]
            pending.append((work, tensor))
            # On a GPU later operations wait, not the host: they may use the memory of the tensor that was sent.
            while len(pending) > self._most:
                pending.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until every send is complete: on a GPU, later operations wait, not the host."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()

    def _end(self, step: int, backward: bool) -> tuple[int, Link]:
        """The neighbour `step` ranks away, by its rank in the world, and the link with it in a direction."""
        rank, ranks = self.parallel.pp_rank, len(self._ring)
        return self._ring[(rank + step) % ranks], self._links[step, backward]


def _links(parallel: Parallel, ring: list[int], closes_ring: bool) -> dict[tuple[int, bool], Link]:
    """This rank's links, by neighbour (-1: the previous rank, 1: the next one) and direction (backward?)."""
    rank, ranks = parallel.pp_rank, len(ring)
    if parallel.device.type == "cpu":
        # gloo tells messages between two ranks apart by tag.
        return {
            (step, backward): Link(parallel.pp_group, int(backward))
            for step in (-1, 1)
            for backward in (False, True)
        }
    count = ranks if closes_ring and ranks > 1 else ranks - 1
    pairs = [(first, (first + 1) % ranks) for first in range(count)]
    groups = pair_groups(ring, pairs, parallel.device)
    # The sender's neighbour is this way; a pair of two ranks that closes a ring has links both ways.
    return {
        (1 if rank == pair[0] else -1, backward): Link(group)
        for (pair, backward), group in groups.items()
        if rank in pair
    }
