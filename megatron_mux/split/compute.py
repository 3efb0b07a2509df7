"""What the server computes for its sessions, on the compute thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mux.errors import failed_allocation
from megatron_mux.split.body import Body, Kept, Rows
from megatron_mux.split.dispatcher import Work
from megatron_mux.split.wire import RefusedError


@dataclass(frozen=True)
class ForwardCall:
    """A forward pass to compute.

    Attributes:
        body: Computes it.
        layers: Of the session's body.
        rows: The request.
        graph: Whether to build the graph of a backward pass, and whether to keep it.
    """

    body: Body
    layers: range
    rows: Rows
    graph: bool = False
    keeps_graph: bool = False


@dataclass(frozen=True)
class BackwardCall:
    """A backward pass to compute.

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
    """Compute forward passes as one micro-batch; the payload of each is a `ForwardCall`.

    Returns:
        For each, its output `[T, H]` and the graph, if it is to be kept.
    """
    calls: list[ForwardCall] = [work.payload for work in works]
    first = calls[0]
    with _memory():
        outputs, kept = first.body.forward([call.rows for call in calls], first.layers, first.graph)
        detached = [output.detach() for output in outputs]
        return [(output, kept if first.keeps_graph else None) for output in detached]


def backward_together(works: Sequence[Work]) -> list[tuple[Tensor | None, float | None]]:
    """Compute backward passes, after their forward passes unless these are kept; payloads are `BackwardCall`s.

    Returns:
        For each, the gradient of its input `[T, H]` if the client needs it; and, after the last of an optimizer step,
        the squared norm of the adapter's gradient.
    """
    calls: list[BackwardCall] = [work.payload for work in works]
    first, kept = calls[0], calls[0].kept
    with _memory():
        if kept is None:
            _, kept = first.body.forward([call.rows for call in calls], first.layers, True)
        assert kept is not None
        made = first.body.backward(kept, [call.gradient for call in calls])
    squares = [call.body.squared_norm(call.rows.session, call.rows.step) if call.last else None for call in calls]
    return list(zip(made, squares, strict=True))
