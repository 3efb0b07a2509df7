"""The experts of a layer, cut at their messages, so that other hybrid tasks can be computed meanwhile.

Forward, and backward:

    [router] sizes | rows [shared experts] | [experts] results | [sum]
    result gradients [shared experts] | [experts] row gradients | [router]

Expert ranks exchange the same messages in the same order, also those without rows.

Shapes: R rows of the micro-batch on this rank, H hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_mux.backbone.experts.exchange import Received, Rows, Sent
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.experts.router import Routes
from megatron_mux.backbone.pieces import CollectiveGenerator, IssuedMessage, Piece, Yields, received
from megatron_mux.batch.packed_batch import PackedBatch, activate


class CutMlp(Protocol):
    """What follows attention in a layer, as generators: `CutExperts`, or an MLP that tensor ranks divide."""

    def forward(self, normed: Tensor, input_needs_grad: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """Compute rows.

        Args:
            normed: `[R, 1, H]`, without a gradient of its own.
            input_needs_grad: Whether `backward` is to return its gradient.

        Returns:
            `[R, 1, H]`, before biases and what adapters do after them; and whether it needs a gradient.
        """
        ...

    def backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """Back-propagate the output's gradient to the adapters. Returns the input's gradient if that is needed."""
        ...


class CutExperts:
    """Experts on one micro-batch; see `CutMlp`.

    Args:
        layer: Router and experts.
        anchor: See `Piece`.
        exchanged: Whether expert ranks take part in the backward pass, with rows or without.
        recomputed: Whether they are computed again for that.
    """

    def __init__(
        self, layer: MoELayer, batch: PackedBatch, anchor: Tensor, exchanged: bool, recomputed: bool
    ) -> None:
        self._layer, self._batch, self._exchanged, self._recomputed = layer, batch, exchanged, recomputed
        self._router, self._shared, self._experts = (Piece(anchor) for _ in range(3))
        self._sent: Sent | None = None
        self._rows: Rows | None = None

    @staticmethod
    def yields(layer: Any) -> Yields:
        """How often it yields: not at all where this process has all experts."""
        return Yields(0, 0) if layer.exchange is None else Yields(3, 2)

    def forward(self, normed: Tensor, input_needs_grad: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """See `CutMlp.forward`."""
        layer, output_needs_grad = self._layer, self._exchanged and torch.is_grad_enabled()
        with activate(self._batch):
            begun = self._router.input(normed, input_needs_grad).squeeze(1)
            routes, slots = layer.route(begun, self._recomputed)
        x, weights = self._router.output(begun)[0], self._router.output(routes.weights)[0]
        arrived = Received(x, weights, routes.experts, slots, routes.experts.numel())
        if layer.exchange is None:
            shared, shared_needs_grad = self._compute_shared(normed, input_needs_grad)
            y, output_needs_grad = self._compute_experts(arrived, input_needs_grad)
        else:
            choice, sizes = layer.exchange.begin(Routes(routes.experts, weights))
            told = received((yield IssuedMessage("sizes", sizes)))
            self._sent = sent = layer.exchange.agreed(choice, told)
            self._rows = rows = Rows(sent)
            leaving = rows.forth(x, weights, slots)
            shared, shared_needs_grad = self._compute_shared(normed, input_needs_grad)
            arrived = rows.arrived(received((yield IssuedMessage("rows", leaving))))
            y, _ = self._compute_experts(arrived, output_needs_grad)
            y = sent.collected(received((yield IssuedMessage("results", sent.back(y)))))
        output = y.unsqueeze(1)
        return output if shared is None else output + shared, output_needs_grad or shared_needs_grad

    def backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """See `CutMlp.backward`."""
        assert gradient is not None
        sent, rows = self._sent, self._rows
        dy = gradient.squeeze(1)
        if sent is None or rows is None:
            dx, dweights = self._experts.backward(dy)
            (d_shared,) = self._back_shared(gradient)
        else:
            leaving = sent.forth(dy.index_select(0, sent.rows))
            (d_shared,) = self._back_shared(gradient)
            dy = received((yield IssuedMessage("result gradients", leaving)))
            dx, dweights = self._experts.backward(dy)
            leaving = rows.back(*self._whole(dx, dweights, dy))
            dx, dweights = rows.returned(received((yield IssuedMessage("row gradients", leaving))))
        (d_normed,) = self._router.backward(dx, dweights)
        if d_normed is None or d_shared is None:
            return d_shared if d_normed is None else d_normed
        return d_shared + d_normed

    def _compute_experts(self, rows: Received, input_needs_grad: bool) -> tuple[Tensor, bool]:
        piece, self._weights = self._experts, rows.weights[:0]
        x, weights = piece.input(rows.x, input_needs_grad), piece.input(rows.weights, input_needs_grad)
        with activate(self._batch):
            return piece.output(self._layer.compute(replace(rows, x=x, weights=weights)))

    def _compute_shared(self, normed: Tensor, input_needs_grad: bool) -> tuple[Tensor | None, bool]:
        shared = self._layer.shared_experts
        if shared is None:
            return None, False
        with activate(self._batch):
            return self._shared.output(shared(self._shared.input(normed, input_needs_grad))[0])

    def _back_shared(self, gradient: Tensor) -> list[Tensor | None]:
        return [None] if self._layer.shared_experts is None else self._shared.backward(gradient)

    def _whole(self, dx: Tensor | None, dweights: Tensor | None, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients with zeros for what is None: other ranks wait for them."""
        if dweights is None:
            dweights = self._weights.new_zeros(len(dy), self._weights.shape[1])
        return torch.zeros_like(dy) if dx is None else dx, dweights
