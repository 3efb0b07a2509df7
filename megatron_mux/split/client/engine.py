"""The engine of a client of split fine-tuning: what the server holds of the task takes part in its steps and saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_mux.adapters.tensors import blank
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.engine.snapshot import HostCopy, HostMemory, LocalState, Snapshot
from megatron_mux.engine.updates import BucketUpdate, update_of
from megatron_mux.split.client.backbone import SplitBackbone
from megatron_mux.split.client.remote import RemoteBody
from megatron_mux.split.protocol.pieces import Piece


class RemoteUpdate(BucketUpdate):
    """Steps the optimizers of both ends together, or neither.

    Args:
        local: The update of the client's part of the only task.
        remote: The server's part.
    """

    def __init__(self, local: BucketUpdate, remote: RemoteBody) -> None:
        super().__init__(local.optimizers)
        self._local = local
        self._remote = remote

    def prepare(self, first: Sequence[int], count: int) -> None:
        """See `BucketUpdate.prepare`."""
        self._local.prepare(first, count)

    def expect(self, passes: Sequence[int]) -> None:
        """See `BucketUpdate.expect`."""
        self._remote.expect(passes)

    def squared_norms(self) -> Tensor:
        """See `BucketUpdate.squared_norms`; of both ends."""
        return self._local.squared_norms() + self._remote.squared_norm

    def update(self, first: Sequence[int], later: int, norms: Tensor, skip: Tensor) -> None:
        """See `BucketUpdate.update`; the server learns of it with the next request."""
        self._local.update(first, later, norms, skip)
        self._remote.finish_step(first[0] + later, float(norms[0]), bool(skip[0]))


class SplitEngine(Engine):
    """Trains one task on a backbone whose body is on a server.

    Args:
        backbone: The client's layers, and the server's.
        kept: Returns the steps of earlier saves that the client may still go back to.
    """

    def __init__(self, backbone: SplitBackbone, kept: Callable[[], Collection[int]] = tuple) -> None:
        self._remote, self._kept = backbone.remote, kept
        super().__init__(
            backbone,
            backbone.parallel,
            Planning("spatial", 1),
            tries_plans=False,  # a trial would take the server's time
            make_update=lambda optimizers: RemoteUpdate(update_of(optimizers), backbone.remote),
        )

    def register_tasks(self, tasks: Sequence[Task]) -> None:
        """See `Engine.register_tasks`; checkpoints may lack what the server has kept."""
        for task in tasks:
            if task.resume is not None:
                unknown = blank(task.spec.adapter.tensors(self.backbone.shape))
                task.resume = partial(_completed, task.resume, unknown)
        super().register_tasks(tasks)

    def local_states(
        self, names: Sequence[str], memory: HostMemory, owned: bool = True
    ) -> dict[str, LocalState]:
        """See `Engine.local_states`; of both ends: the server saves its part meanwhile."""
        states = super().local_states(names, memory, owned)
        return {name: _joined(state, self._remote.link.save(self._kept())) for name, state in states.items()}


def _completed(resume: Callable[[], Snapshot], unknown: Mapping[str, Tensor]) -> Snapshot:
    snapshot = resume()
    return replace(snapshot, adapter={**unknown, **snapshot.adapter})


def _joined(state: LocalState, pieces: Sequence[Piece]) -> LocalState:
    """A task's state with what the server has sent of it."""
    places, copies = list(state.places), list(state.copies)
    for piece in pieces:
        index, tensor = piece.index, piece.tensor.contiguous()
        places.append(
            (piece.key, piece.shape, piece.dim, None if index is None else index.numpy(), piece.kind)
        )
        block = tensor.view(-1).view(torch.uint8)
        copies.append(HostCopy(block, tensor.dtype, tensor.shape, tensor.stride(), 0))
    return replace(state, places=places, copies=copies)
