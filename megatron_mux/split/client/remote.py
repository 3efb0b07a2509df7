"""The body on the server, as the client's backbone calls it: hidden states out and back, gradients back and out.

What is not finite is not sent. The step then fails on the client, which tells the server to skip it too.

Shapes: T rows of a micro-batch, H hidden.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.errors import UserError
from megatron_mux.split.client.link import ServerConnection
from megatron_mux.split.protocol.messages import Backward, Forward, Gradient
from megatron_mux.split.protocol.wire import Dtype, Flags, Kind

_SENT_AS = {
    Dtype.F64: torch.float64,
    Dtype.F32: torch.float32,
    Dtype.BF16: torch.bfloat16,
    Dtype.F16: torch.float16,
    Dtype.I8: torch.float32,  # the codec quantises it
}


class Privacy(Protocol):
    """Clips what leaves the client and adds noise to it.

    Passes are numbered within their optimizer step, those of its micro-batches and those of evaluations after it apart:
    a run that is continued counts alike.
    """

    def activations(self, hidden: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        """What is sent instead of hidden states `[T, H]`, differentiable.

        Args:
            hidden: The rows of all sequences.
            lengths: Rows of each.
            operation: Number of the pass.
        """

    def gradients(self, gradient: Tensor, lengths: Sequence[int], step: int, operation: int) -> Tensor:
        """What is sent instead of the gradient `[T, H]` of what came back; arguments as of `activations`."""


class RemoteBody:
    """Computes the layers that the server holds.

    Args:
        link: The session there.
        trained: Whether the task has an adapter in the body.
        device: Where hidden states are.
        privacy: Protects what is sent; None: it is sent as it is.

    Attributes:
        squared_norm: Of the server's gradients of the current step, once its last backward pass is done: 0 if the step
            had none there, not a number if something was not finite.
    """

    def __init__(
        self, link: ServerConnection, trained: bool, device: torch.device, privacy: Privacy | None = None
    ) -> None:
        self.link = link
        self.privacy = privacy
        self.squared_norm = 0.0
        self._anchor = torch.zeros(0, device=device, requires_grad=trained)
        self._left: deque[int] = deque()
        self._passes = {True: 0, False: 0}

    def __call__(self, batch: PackedBatch, hidden: Tensor) -> Tensor:
        """Compute the body on a micro-batch.

        Args:
            hidden: `[T, 1, H]` hidden states of the layer before the body.

        Returns:
            `[T, 1, H]` of its last layer; they require a gradient only if `hidden` does or the task has an adapter in
            the body.
        """
        lengths = tuple(segment.length for segment in batch.segments)
        ids = tuple(segment.sequence for segment in batch.segments)
        run = _Pass(self, lengths, ids, self._passes[batch.training], hidden.dtype)
        self._passes[batch.training] += 1
        rows = hidden.squeeze(1)
        if self.privacy is not None:
            rows = self.privacy.activations(rows, lengths, self.link.step, run.number)
        trained = rows.requires_grad or self._anchor.requires_grad
        if not (batch.training and torch.is_grad_enabled() and trained):
            return run.forward(rows, Flags.NONE).unsqueeze(1)
        flags = Flags.TRAINING | (Flags.NEEDS_INPUT if rows.requires_grad else Flags.NONE)
        output: Tensor = _Remote.apply(self._anchor, rows, run, flags)  # type: ignore[no-untyped-call]
        return output.unsqueeze(1)

    # -- optimizer steps

    def expect(self, passes: Sequence[int]) -> None:
        """Note how many backward passes each of the next optimizer steps has."""
        self._left = deque(passes)
        self.squared_norm = 0.0

    def finish_step(self, step: int, norm: float, skip: bool) -> None:
        """End an optimizer step; see `ServerConnection.decide`."""
        self._left.popleft()
        self._passes = {True: 0, False: 0}
        self.squared_norm = 0.0
        self.link.decide(step, norm, skip)

    def count_backward(self) -> bool:
        """Count a backward pass; returns whether it is the last of its step."""
        self._left[0] -= 1
        return self._left[0] == 0


@dataclass(eq=False)
class _Pass:
    """A micro-batch's forward pass on the server, and its backward.

    Attributes:
        body: Whose.
        lengths, ids: Tokens and number of each sequence.
        number: See `Privacy`.
        dtype: Of the client's layers.
        operation: Of the forward pass; 0: nothing was sent.
    """

    body: RemoteBody
    lengths: tuple[int, ...]
    ids: tuple[int, ...]
    number: int
    dtype: torch.dtype
    operation: int = 0

    def forward(self, rows: Tensor, flags: Flags) -> Tensor:
        """`[T, H]` to the same, in `dtype`."""
        link = self.body.link
        sent = rows.detach().to("cpu", _SENT_AS[link.wire])
        if not _is_finite(sent):
            return torch.full_like(rows, math.nan, dtype=self.dtype)
        self.operation = link.next_operation
        fields = Forward(lengths=list(self.lengths), ids=list(self.ids))
        reply = link.request(Kind.FORWARD, fields, flags, sent)
        return _received(reply.tensor, rows, self.dtype)

    def backward(self, gradient: Tensor, flags: Flags) -> Tensor | None:
        """`[T, H]` gradient of the output to that of what was sent, if that is needed."""
        body, link = self.body, self.body.link
        if body.count_backward():
            flags |= Flags.LAST
        needed = Flags.NEEDS_INPUT in flags
        sent = gradient
        if body.privacy is not None:
            sent = body.privacy.gradients(gradient, self.lengths, link.step, self.number)
        sent = sent.to("cpu", _SENT_AS[link.wire])
        if not (self.operation and _is_finite(sent)):
            body.squared_norm = math.nan
            return torch.full_like(gradient, math.nan) if needed else None
        reply = link.request(Kind.BACKWARD, Backward(forward=self.operation), flags, sent)
        if Flags.LAST in flags:
            norm = reply.read(Gradient).squared_norm
            body.squared_norm += math.nan if norm is None else norm
        return _received(reply.tensor, gradient, self.dtype) if needed else None


class _Remote(torch.autograd.Function):
    """A micro-batch's passes on the server; `anchor` requires a gradient, and gets none, if the body has an adapter."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, run: _Pass, flags: Flags) -> Tensor:
        ctx.run, ctx.flags = run, flags
        return run.forward(rows, flags)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        return None, ctx.run.backward(gradient, ctx.flags), None, None


def _received(tensor: Tensor | None, sent: Tensor, dtype: torch.dtype) -> Tensor:
    """A reply's `[T, H]` in a dtype, on the device of what was sent.

    Raises:
        UserError: It has another shape.
    """
    if tensor is None or tensor.shape != sent.shape:
        got = "nothing" if tensor is None else list(tensor.shape)
        raise UserError(f"The server's reply must be {list(sent.shape)}, got {got}")
    return tensor.to(sent.device, dtype)


def _is_finite(tensor: Tensor) -> bool:
    # The extremes are NaN if any value is.
    return all(map(math.isfinite, map(float, torch.aminmax(tensor.detach()))))
