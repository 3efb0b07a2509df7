"""A body on several ranks: rank 0 decides, and tells the others what to compute with it.

Tensor ranks share each layer and compute all rows; pipeline ranks have some layers each, and hand hidden states and
gradients on. One call is computed at a time. Commands are JSON and raw tensors, sent to all ranks. A call that fails on
some rank leaves the ranks out of step, so it ends them all; only a session that cannot be added is refused.

Shapes: T rows, H hidden.
"""

from __future__ import annotations

import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.registry import KINDS
from megatron_mux.backbone.model import Backbone
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.engine.agreement import raise_on_every_rank
from megatron_mux.errors import UserError
from megatron_mux.liveness import Liveness
from megatron_mux.runtime import Parallel
from megatron_mux.split.protocol.pieces import Piece, from_index, to_index
from megatron_mux.split.server.body import Body, Kept, Rows
from megatron_mux.split.server.rank_messages import broadcast, put, take
from megatron_mux.tasks import TrainingSpec

IDLE_MINUTES = 60 * 24 * 365
"""How long ranks wait for the next command: clients may be away for days. `watched` ends all ranks if one dies."""

_ADVICE = "Clients go on from their newest saves once the server has been started again."


@contextmanager
def watched(parallel: Parallel, program: str) -> Iterator[Parallel]:
    """Context that ends all ranks, with a message, if one of them dies or fails. Every rank enters it.

    Returns:
        The place, for the body.

    Raises:
        UserError: Rank 0 cannot be reached.
    """
    if parallel.world_size == 1:
        yield parallel
        return
    name = f"rank {parallel.rank} (pipeline stage {parallel.pp_rank}, {socket.gethostname()})"
    idle = IDLE_MINUTES * 60.0  # waiting for a command is no stall
    with Liveness(
        parallel.rank, parallel.world_size, name, idle, _ADVICE, before_exit=lambda: None, program=program
    ) as liveness:
        yield replace(parallel, heartbeat=liveness)


class StagedBody(Body):
    """A rank's part of a body that is divided among pipeline ranks (and tensor ranks, which `Body` knows)."""

    def __init__(self, backbone: Backbone, parallel: Parallel) -> None:
        super().__init__(backbone, parallel)
        rank, ring = parallel.pp_rank, parallel.pipeline_ranks
        self._before = ring[rank - 1] if rank else None
        self._behind = ring[rank + 1] if rank + 1 < len(ring) else None
        self._first, self._last = ring[0], ring[-1]
        self._leaf: Tensor | None = None

    def _compute(self, batch: PackedBatch, hidden: Tensor, layers: range) -> Tensor:
        """See `Body._compute`: hidden states come from the stage before, and go on to the next one."""
        self._leaf = None
        if self._before is not None:
            self._leaf = hidden = self._receive(hidden, self._before).requires_grad_(torch.is_grad_enabled())
        output = super()._compute(batch, hidden, layers)
        if self._behind is not None:
            self._send(output, self._behind)
        return output

    def forward(self, rows: Sequence[Rows], layers: range, graph: bool) -> tuple[list[Tensor], Kept | None]:
        """See `Body.forward`; the first stage returns what the last one has made."""
        outputs, kept = super().forward(rows, layers, graph)
        if kept is not None and self._leaf is not None:
            kept.received = self._leaf
        self._leaf = None
        if self._first == self._last:
            return outputs, kept
        sizes = [r.count for r in rows]
        if self._behind is None:
            self._send(torch.cat(outputs), self._first)
        elif self._before is None:
            whole = self._receive(torch.cat(outputs), self._last)
            outputs = list(whole.split(sizes))
        return outputs, kept

    def backward(self, kept: Kept, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """See `Body.backward`; gradients go back from stage to stage."""
        if self._behind is not None:
            whole = self._receive(torch.cat(list(gradients)), self._behind)
            gradients = whole.split([g.shape[0] for g in gradients])
        received = kept.received
        made = super().backward(kept, gradients)
        if self._before is not None:
            assert received is not None
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self._send(gradient.squeeze(1), self._before)
        return made

    def _send(self, tensor: Tensor, rank: int) -> None:
        dist.send(tensor.detach().contiguous(), rank, group=self.parallel.pp_group)

    def _receive(self, like: Tensor, rank: int) -> Tensor:
        tensor = torch.empty_like(like, requires_grad=False)
        dist.recv(tensor, rank, group=self.parallel.pp_group)
        return tensor

    def state(self, name: str) -> list[Piece]:
        """See `Body.state`; on rank 0 of all ranks."""
        state, device = super().state(name), self.parallel.device
        if self.parallel.rank:
            tensors = [piece.tensor for piece in state]
            put({"index": to_index(state)}, tensors, device, lambda tensor: dist.send(tensor, 0))
            return state
        for rank in range(1, self.parallel.world_size):
            fields, sent = take(device, lambda tensor, rank=rank: dist.recv(tensor, rank))  # type: ignore[misc]
            state += _pieces(fields["index"], sent)
        return state


class LeadingBody(StagedBody):
    """Rank 0's: every call is told to the other ranks first."""

    def __init__(self, backbone: Backbone, parallel: Parallel) -> None:
        super().__init__(backbone, parallel)
        self._numbers = count()
        self._forgotten: deque[int] = deque()  # appended to by whichever thread drops a graph last

    def add(
        self,
        name: str,
        adapter: AdapterSpec,
        training: TrainingSpec,
        layers: range,
        total_steps: int,
        initial: Sequence[Piece] = (),
    ) -> None:
        """See `Body.add`."""
        told = {
            "name": name,
            "adapter": adapter.model_dump(mode="json"),
            "training": training.model_dump(mode="json"),
            "layers": [layers.start, layers.stop],
            "total_steps": total_steps,
            "pieces": to_index(initial),
        }
        with self._telling("add", told, [piece.tensor for piece in initial]):
            _together(
                self, lambda: Body.add(self, name, adapter, training, layers, total_steps, initial), name
            )

    def remove(self, name: str) -> None:
        """See `Body.remove`."""
        with self._telling("remove", {"name": name}):
            super().remove(name)

    def forward(self, rows: Sequence[Rows], layers: range, graph: bool) -> tuple[list[Tensor], Kept | None]:
        """See `Body.forward`."""
        number = next(self._numbers)
        fields = {
            "rows": _told(rows),
            "layers": [layers.start, layers.stop],
            "graph": graph,
            "number": number,
        }
        with self._telling("forward", fields, [r.hidden for r in rows]):
            outputs, kept = super().forward(rows, layers, graph)
        if kept is not None:
            kept.number = number
            weakref.finalize(kept, self._forgotten.append, number)
        return outputs, kept

    def backward(self, kept: Kept, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """See `Body.backward`."""
        with self._telling("backward", {"number": kept.number}, gradients):
            return super().backward(kept, gradients)

    def squared_norm(self, name: str, step: int) -> float:
        """See `Body.squared_norm`."""
        with self._telling("squared_norm", {"name": name, "step": step}):
            return super().squared_norm(name, step)

    def update(self, name: str, step: int, norm: float, skip: bool) -> None:
        """See `Body.update`."""
        with self._telling("update", {"name": name, "step": step, "norm": norm, "skip": skip}):
            super().update(name, step, norm, skip)

    def zero(self, name: str) -> None:
        """See `Body.zero`."""
        with self._telling("zero", {"name": name}):
            super().zero(name)

    def state(self, name: str) -> list[Piece]:
        """See `Body.state`."""
        with self._telling("state", {"name": name}):
            return super().state(name)

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        with self._telling("stop", {}):
            pass

    @contextmanager
    def _telling(
        self, what: str, fields: Mapping[str, Any], tensors: Sequence[Tensor] = ()
    ) -> Iterator[None]:
        """Context of a call that the other ranks are told of; ends all ranks if it fails."""
        forgotten = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        try:
            put({"what": what, "forgotten": forgotten, **fields}, tensors, self.parallel.device, broadcast)
            yield
        except UserError:
            raise  # on every rank
        except Exception as error:
            self.parallel.heartbeat.fail(error)
            raise


def follow(body: StagedBody) -> None:
    """Do on this rank what rank 0 does, until it stops."""
    kept: dict[int, Kept] = {}
    while True:
        command, tensors = take(body.parallel.device, broadcast)
        for number in command.pop("forgotten"):
            kept.pop(number, None)
        what = command.pop("what")
        if what == "stop":
            return
        _obey(body, kept, what, command, tensors)
        del tensors


def _obey(
    body: StagedBody, kept: dict[int, Kept], what: str, command: dict[str, Any], tensors: list[Tensor]
) -> None:
    """Do what rank 0 does, and forget it: nothing outlives this but what is in `kept`."""
    if what == "forward":
        layers, rows = range(*command["layers"]), zip(command["rows"], tensors, strict=True)
        requests = [_rows(fields, hidden) for fields, hidden in rows]
        _, made = body.forward(requests, layers, command["graph"])
        if made is not None:
            kept[command["number"]] = made
    elif what == "backward":
        body.backward(kept.pop(command["number"]), tensors)
    elif what == "add":
        _add(body, command, tensors)
    else:
        getattr(body, what)(**command)


def _add(body: StagedBody, command: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
    """Add a session; if that fails, rank 0 says why."""
    adapter = KINDS[command["adapter"]["peft_type"]].model_validate(command["adapter"])
    training = TrainingSpec.model_validate(command["training"])
    pieces = _pieces(command["pieces"], tensors)
    name, layers = command["name"], range(*command["layers"])
    try:
        _together(
            body,
            lambda: Body.add(body, name, adapter, training, layers, command["total_steps"], pieces),
            name,
        )
    except UserError:
        pass


def _together(body: Body, add: Callable[[], None], name: str) -> None:
    """Add a session on every rank, or on none.

    Raises:
        UserError: With the problem of the first rank that has one.
    """
    problem = ""
    try:
        add()
    except (UserError, torch.OutOfMemoryError) as error:
        problem = str(error)
    try:
        raise_on_every_rank(problem, body.parallel)
    except UserError:
        if not problem:
            Body.remove(body, name)
        raise


def _told(rows: Sequence[Rows]) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(r).items() if name != "hidden"} for r in rows]


def _rows(fields: dict[str, Any], hidden: Tensor) -> Rows:
    lists = {"lengths": tuple(fields["lengths"]), "ids": tuple(fields["ids"])}
    return Rows(**{**fields, **lists}, hidden=hidden)


def _pieces(index: Any, tensors: Sequence[Tensor]) -> list[Piece]:
    return from_index(index, [tensor.cpu() for tensor in tensors])
