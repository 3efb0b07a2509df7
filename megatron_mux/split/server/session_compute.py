"""What the server computes for its sessions, on the compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mux.errors import failed_allocation
from megatron_mux.split.protocol.agreement import Proposal
from megatron_mux.split.protocol.pieces import Piece
from megatron_mux.split.protocol.wire import RefusedError
from megatron_mux.split.server.body import Body, Kept, Rows
from megatron_mux.split.server.dispatcher import Work
from megatron_mux.split.server.policies import Keeping


@dataclass(frozen=True)
class ForwardCall:
    """A forward pass to compute: the payload of `forward_together`.

    Attributes:
        layers: Of the session's body.
        rows: The request.
        keeps: What of it to keep: a graph is built only to be kept.
    """

    layers: range
    rows: Rows
    keeps: Keeping = "input"


@dataclass(frozen=True)
class BackwardCall:
    """A backward pass to compute: the payload of `backward_together`.

    Attributes:
        layers, rows: Of its forward pass.
        gradient: `[T, H]` of its output.
        kept: The graph of its forward pass; None: that is computed again.
        last: Whether it is the last of its optimizer step.
    """

    layers: range
    rows: Rows
    gradient: Tensor
    kept: Kept | None = None
    last: bool = False


def forward_together(body: Body, works: Sequence[Work]) -> list[tuple[Tensor, Kept | None]]:
    """Compute forward passes as one micro-batch.

    Returns:
        For each, its output `[T, H]`, and its graph if that is kept.
    """
    calls: list[ForwardCall] = [work.payload for work in works]
    first = calls[0]
    with refusing_out_of_memory(), _saved_tensors(first):
        graph = first.keeps != "input"
        outputs, kept = body.forward([call.rows for call in calls], first.layers, graph)
    return [(output, kept) for output in outputs]


def backward_together(body: Body, works: Sequence[Work]) -> list[tuple[Tensor | None, float | None]]:
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
            _, kept = body.forward([call.rows for call in calls], first.layers, graph=True)
        assert kept is not None
        made = body.backward(kept, [call.gradient for call in calls])
    squares = [body.squared_norm(call.rows.session, call.rows.step) if call.last else None for call in calls]
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


def attach(body: Body, name: str, proposal: Proposal, layers: range, pieces: Sequence[Piece] = ()) -> None:
    """Attach a session's adapter to the layers of its body; see `Body.add`."""
    with refusing_out_of_memory():
        body.add(name, proposal.adapter_spec(), proposal.training, layers, proposal.total_steps, pieces)


def start_from(body: Body, name: str, proposal: Proposal, layers: range, pieces: Sequence[Piece]) -> None:
    """Give a session's adapter other values than its seed's.

    Raises:
        UserError: They are not those of the adapter.
    """
    body.remove(name)
    try:
        attach(body, name, proposal, layers, pieces)
    except BaseException:
        attach(body, name, proposal, layers)
        raise
