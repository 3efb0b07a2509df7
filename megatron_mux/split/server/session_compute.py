"""What the server computes for its sessions, on the compute thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.backbone.model_directory import open_checkpoint
from megatron_mux.errors import UserError, failed_allocation
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server.body import Body, Kept, Rows
from megatron_mux.split.server.dispatcher import Work
from megatron_mux.split.server.policies import Keeping
from megatron_mux.split.server.session_memory import Memory, profile


@dataclass(frozen=True)
class ForwardCall:
    """A forward pass to compute: the payload of `forward_together`.

    Attributes:
        body: Computes it.
        layers: Of the session's body.
        rows: The request.
        graph: Whether to build the graph of a backward pass.
        keeps: What of it to keep.
    """

    body: Body
    layers: range
    rows: Rows
    graph: bool = False
    keeps: Keeping = "input"


@dataclass(frozen=True)
class BackwardCall:
    """A backward pass to compute: the payload of `backward_together`.

    Attributes:
        body, layers, rows: Of its forward pass.
        gradient: `[T, H]` of its output.
        kept: The graph of its forward pass; None: that is computed again.
        last: Whether it is the last of its optimizer step.
    """

    body: Body
    layers: range
    rows: Rows
    gradient: Tensor
    kept: Kept | None = None
    last: bool = False


def forward_together(works: Sequence[Work]) -> list[tuple[Tensor, Kept | None]]:
    """Compute forward passes as one micro-batch.

    Returns:
        For each, its output `[T, H]`, and its graph if that is kept.
    """
    calls: list[ForwardCall] = [work.payload for work in works]
    first = calls[0]
    with refusing_out_of_memory(), _saved_tensors(first):
        outputs, kept = first.body.forward([call.rows for call in calls], first.layers, first.graph)
    return [(output, None if first.keeps == "input" else kept) for output in outputs]


def backward_together(works: Sequence[Work]) -> list[tuple[Tensor | None, float | None]]:
    """Compute backward passes, after their forward passes unless these were kept.

    Returns:
        For each, the gradient of its input `[T, H]` if the client needs it; and, after the last of an optimizer step,
        the squared norm of the gradient of the session's adapter.
    """
    calls: list[BackwardCall] = [work.payload for work in works]
    first = calls[0]
    with refusing_out_of_memory():
        kept = first.kept
        if kept is None:
            _, kept = first.body.forward([call.rows for call in calls], first.layers, graph=True)
        assert kept is not None
        made = first.body.backward(kept, [call.gradient for call in calls])
    squares = [
        call.body.squared_norm(call.rows.session, call.rows.step) if call.last else None for call in calls
    ]
    return list(zip(made, squares, strict=True))


def _saved_tensors(call: ForwardCall) -> AbstractContextManager[object]:
    """Where autograd keeps what it saves for the backward."""
    if call.keeps != "graph in host memory":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=call.rows.hidden.is_cuda)


class refusing_out_of_memory(AbstractContextManager[None]):
    """Context that answers a request whose computation runs out of memory with a refusal."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            raise RefusedError(
                "memory", f"the server ran out of memory ({failed_allocation(error)})"
            ) from None


class Bodies:
    """The body that each session is computed on: one for all, or with the policy `vanilla` a copy for each.

    Args:
        shared: The body.
        copies: Whether each session has a copy of its parameters.
        swap_rate: Bytes a second at which copies go to host memory and come back. On a CPU, where they are there
            already, that much time passes.
    """

    def __init__(self, shared: Body, copies: bool, swap_rate: float) -> None:
        self.shared = shared
        self.copies = copies
        self.swap_rate = swap_rate
        self._own: dict[str, Body] = {}

    def of(self, name: str) -> Body:
        """The body of a session."""
        return self._own.get(name, self.shared)

    def add(self, name: str, proposal: Proposal, layers: range, pieces: Sequence[Piece] = ()) -> None:
        """Attach a session's adapter; see `Body.add`."""
        if self.copies and name not in self._own:
            own, parallel = self.shared.backbone, self.shared.parallel
            source = open_checkpoint(own.info.path, own.info.shape)
            copy = Backbone(own.info, parallel, own.layers, own.dtype, "none", "resident", source, ends=False)
            self._own[name] = Body(copy, parallel)
        body = self.of(name)
        body.add(name, proposal.adapter_spec(), proposal.training, layers, proposal.total_steps, pieces)

    def join(self, name: str, proposal: Proposal, layers: range, pieces: Sequence[Piece] | None) -> Memory:
        """Add a session and measure what it and its requests take.

        Raises:
            UserError: It does not fit the backbone, or has numbers that cannot be computed with.
        """
        with refusing_out_of_memory():
            self.add(name, proposal, layers, pieces or ())
            try:
                memory = profile(self.of(name), name, proposal, layers)
            except BaseException as error:
                self.remove(name)
                if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                    raise UserError(f"the task cannot be computed: {error}") from None
                raise
        return memory

    def start_from(self, name: str, proposal: Proposal, layers: range, pieces: Sequence[Piece]) -> None:
        """Give a session's adapter other values than its seed's.

        Raises:
            UserError: They are not those of the adapter.
        """
        self.of(name).remove(name)
        try:
            self.add(name, proposal, layers, pieces)
        except BaseException:
            self.add(name, proposal, layers)
            raise

    def remove(self, name: str) -> None:
        """Detach a session's adapter, if it is there."""
        if self.of(name).has(name):
            self.of(name).remove(name)
        self._own.pop(name, None)

    @property
    def own_parameters(self) -> int:
        """Bytes of parameters that each session has for itself."""
        return self.shared.shared_bytes if self.copies else 0

    @property
    def host_rate(self) -> float:
        """Bytes a second between the device and host memory; 0 where they are the same."""
        return self.swap_rate if self.shared.backbone.device.type == "cuda" else 0.0

    def swap(self, size: int) -> None:
        """Move a task to host memory, or back."""
        time.sleep(size / self.swap_rate)
