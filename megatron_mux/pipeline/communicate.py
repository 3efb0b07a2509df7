"""Hidden states and their gradients between neighbouring stages, with shapes both sides know beforehand."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.runtime import Parallel


class Communicator:
    """Point-to-point transfers of one stage: asynchronous sends, blocking receives.

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
        """Prepare for a template that has so many units in flight on some stage.

        Neighbours never lag further behind each other than that, so older sends are done and waiting is not waiting.
        """
        self._most = max(self._least, in_flight + 1)

    def receive_hidden(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Hidden states of the previous stage, or None on the first stage."""
        return self._receive(self.previous, shape, dtype, self.forward_group)

    def send_hidden(self, hidden: Tensor) -> None:
        """Hand hidden states to the next stage; nothing on the last."""
        self._send(self.following, hidden, self.forward_group)

    def receive_gradient(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Gradient from the next stage, or None on the last stage."""
        return self._receive(self.following, shape, dtype, self.backward_group)

    def send_gradient(self, gradient: Tensor) -> None:
        """Hand the input's gradient to the previous stage; nothing on the first."""
        self._send(self.previous, gradient, self.backward_group)

    def finish(self) -> None:
        """Wait for every send."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()

    def _send(self, peer: int | None, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        if peer is None:
            return
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, peer, group=group)
        if work is not None:
            pending = self._pending.setdefault(peer, deque())
            pending.append((work, tensor))
            while len(pending) > self._most:
                pending.popleft()[0].wait()

    def _receive(
        self, peer: int | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup | None
    ) -> Tensor | None:
        if peer is None:
            return None
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(buffer, peer, group=group)
        return buffer
