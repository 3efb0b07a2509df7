"""Hidden states and their gradients between neighbouring stages, with shapes both sides know beforehand."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

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


class Inbox:
    """What one neighbour will send: receives are posted in the order of its sends, some ahead of their use.

    Args:
        peer: Global rank of the neighbour.
        group: The process group of that direction.
        device: Where received tensors are allocated.
        messages: All that it will send, in its order; asked for a message at a time.
    """

    def __init__(
        self, peer: int, group: dist.ProcessGroup | None, device: torch.device, messages: Iterable[Message]
    ) -> None:
        self.peer = peer
        self.group = group
        self.device = device
        self._coming = iter(messages)
        self._posted: deque[tuple[Action, dist.Work | None, Tensor]] = deque()

    def post(self) -> None:
        """Ask for the next messages, so that they may arrive while this stage computes."""
        while len(self._posted) < _AHEAD and (message := next(self._coming, None)) is not None:
            buffer = torch.empty(message.shape, dtype=message.dtype, device=self.device)
            # What is empty does not travel: both sides know.
            work = dist.irecv(buffer, self.peer, group=self.group) if buffer.numel() else None
            self._posted.append((message.action, work, buffer))

    def take(self, action: Action) -> Tensor:
        """What `action` needs; waits for it."""
        self.post()
        due, work, buffer = self._posted.popleft()
        if due != action:
            raise RuntimeError(f"{action} is to run, but the neighbour's next message is for {due}")
        self.post()
        if work is not None:
            work.wait()
        return buffer


class Communicator:
    """Point-to-point transfers of one stage: asynchronous both ways.

    Forward and backward traffic use a process group each, so that on NCCL (which matches operations in issue
    order within a communicator) two neighbours that both send first do not wait for each other.

    Args:
        previous: Global rank of the previous stage, or None on the first.
        following: Global rank of the next stage, or None on the last.
        forward_group: Group for hidden states.
        backward_group: Group for gradients.
        device: Where received tensors are allocated.
        stages: Depth of the pipeline: bounds how many sent tensors are kept alive.
    """

    def __init__(
        self,
        previous: int | None,
        following: int | None,
        forward_group: dist.ProcessGroup | None,
        backward_group: dist.ProcessGroup | None,
        device: torch.device,
        stages: int,
    ) -> None:
        self.previous = previous
        self.following = following
        self.forward_group = forward_group
        self.backward_group = backward_group
        self.device = device
        # A send's tensor must outlive it, and gloo completes a send only when it is waited for. Waiting for a send that
        # is more than a pipeline's depth old holds nobody up: its receiver has long asked for it, or asks next.
        self._pending: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        self._most = 2 * (stages + 1)
        self._least = self._most

    @classmethod
    def between_stages(cls, parallel: Parallel) -> Communicator:
        """The transfers of this rank's stage. Every rank calls it (NCCL needs a second set of groups)."""
        backward_group = parallel.pp_group
        if parallel.pp_size > 1 and parallel.device.type == "cuda":
            pipelines: list[list[int]] = [[] for _ in range(parallel.world_size)]
            dist.all_gather_object(pipelines, dist.get_process_group_ranks(parallel.pp_group))
            every = [list(ranks) for ranks in sorted({tuple(ranks) for ranks in pipelines})]
            backward_group, _ = dist.new_subgroups_by_enumeration(every)
        return cls(
            None if parallel.is_first_stage else parallel.prev_rank,
            None if parallel.is_last_stage else parallel.next_rank,
            parallel.pp_group,
            backward_group,
            parallel.device,
            parallel.pp_size,
        )

    def expect(self, in_flight: int) -> None:
        """Prepare for a template that has so many units in flight on some stage, or buckets between two of its steps.

        Neighbours never lag further behind each other than that, so older sends are done and waiting is not waiting.
        """
        self._most = max(self._least, in_flight + 1)

    def inbox(self, messages: Iterable[Message], backward: bool) -> Inbox | None:
        """Of what the neighbour on one side will send; None where there is no neighbour.

        Args:
            messages: In the neighbour's order.
            backward: From the next stage, else from the previous one.
        """
        peer = self.following if backward else self.previous
        if peer is None:
            return None
        group = self.backward_group if backward else self.forward_group
        return Inbox(peer, group, self.device, messages)

    def send(self, tensor: Tensor, backward: bool) -> None:
        """Hand a tensor to the previous stage (`backward`) or to the next; nothing where there is none."""
        if backward:
            self._send(self.previous, tensor, self.backward_group)
        else:
            self._send(self.following, tensor, self.forward_group)

    def finish(self) -> None:
        """Wait for every send."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()

    def _send(self, peer: int | None, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        if peer is None or not tensor.numel():
            return
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=group)
        if work is not None:
            pending = self._pending.setdefault(peer, deque())
            pending.append((work, tensor))
            while len(pending) > self._most:
                pending.popleft()[0].wait()
