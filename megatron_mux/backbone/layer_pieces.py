"""A layer, cut at its messages, so that other hybrid tasks can be computed meanwhile.

Tensor ranks: one all-reduce after attention and one after the MLP, in each direction:

    [norm, attention] message [join, norm, MLP] message [join]

The pieces are made of the functions that compute a whole layer (`layer.py`).

Sequence parallelism adds a message before attention and before the MLP, each way. What acts between a message and the
residual (biases, adapters after the reduction, norms of a sublayer's output) belongs to the join. Experts in the place
of the MLP have messages of their own: see `cut_experts`.

Shapes: T rows of the micro-batch on this rank, N labelled ones, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_mux.backbone.cut_experts import CutExperts, CutMlp
from megatron_mux.backbone.experts.layer import MoELayer
from megatron_mux.backbone.latent_attention import LatentAttention
from megatron_mux.backbone.layer import after_mlp, attend, before_attention, before_mlp
from megatron_mux.backbone.pieces import (
    CollectiveGenerator,
    Message,
    MessageKind,
    Piece,
    Yields,
    nothing,
    received,
    without_collectives,
)
from megatron_mux.backbone.rotary import Angles
from megatron_mux.batch.packed_batch import PackedBatch, activate


@dataclass(frozen=True)
class TensorMessages:
    """The messages of attention, or of an MLP, among tensor ranks that divide it.

    Attributes:
        divided: Whether there are several tensor ranks.
        sequence_parallel: Whether they divide the rows outside of it.
    """

    divided: bool
    sequence_parallel: bool

    @property
    def yields(self) -> Yields:
        """How often it yields."""
        count = 0 if not self.divided else 2 if self.sequence_parallel else 1
        return Yields(count, count)

    def gather_input(self, normed: Tensor) -> CollectiveGenerator[Tensor]:
        """Its input: all rows."""
        if not self.divided:
            # As Megatron does: the strides of a view decide which product a matrix library computes, to the bit.
            return normed.view_as(normed)
        if not self.sequence_parallel:
            return normed
        return received((yield Message("all_gather", normed)))

    def gather_input_backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """The input's gradient, summed."""
        if not self.divided:
            return gradient
        return (yield None if gradient is None else Message(self._summing, gradient))

    def reduce_output(self, partial: Tensor) -> CollectiveGenerator[Tensor]:
        """Its output, summed."""
        return received((yield Message(self._summing, partial))) if self.divided else partial

    def reduce_output_backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """The output's gradient: all rows."""
        if not self.sequence_parallel:
            return gradient
        return (yield None if gradient is None else Message("all_gather", gradient.contiguous()))

    @property
    def _summing(self) -> MessageKind:
        return "reduce_scatter" if self.sequence_parallel else "all_reduce"


@dataclass
class LayerPieces:
    """A layer's forward and backward on one micro-batch, as generators; see `pieces.CollectiveGenerator`.

    Attributes:
        layer: Megatron's transformer layer.
        batch: The active micro-batch; without rows the layer has experts, which may compute those of other ranks.
        angles: The rotary angles of the tokens; None without rotary embedding.
        messages: Those of attention, and of an MLP.
        labelled_only: Compute the MLP on labelled rows only.
        recompute: Keep the input alone, and compute the layer again, messages included, before its backward.
        last_norm: Applied to the output: the final norm after the last layer, else None.
        anchor: See `Piece`.
        exchanged: Whether expert ranks take part in the backward pass, with rows or without.
        output_needs_grad: Whether the output of `forward` needs a gradient.
    """

    layer: Any
    batch: PackedBatch
    angles: Angles | None
    messages: TensorMessages
    labelled_only: bool
    recompute: bool
    last_norm: Callable[[Tensor], Tensor] | None
    anchor: Tensor
    exchanged: bool

    def __post_init__(self) -> None:
        self._pieces: _Pieces | None = None
        self._input: tuple[Tensor, bool] | None = None  # to compute the layer again
        self.output_needs_grad = False

    def forward(self, x: Tensor, input_needs_grad: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """Compute the layer.

        Args:
            x: `[T, 1, H]`, without a gradient of its own.
            input_needs_grad: Whether `backward` is to return its gradient.

        Returns:
            `[T, 1, H]`, or `[N, 1, H]` with `labelled_only`; and whether it needs a gradient.
        """
        output, self.output_needs_grad = yield from self._compute(x, input_needs_grad)
        if self.recompute or not self.output_needs_grad:
            self._pieces = None
        if self.recompute and self.output_needs_grad:
            self._input = x, input_needs_grad
        return output, self.output_needs_grad

    def backward(self, dx: Tensor) -> CollectiveGenerator[Tensor | None]:
        """Back-propagate the output's gradient to the adapters. Returns the input's gradient if that is needed."""
        if self._input is not None:
            of_input, self._input = self._input, None
            yield from self._compute(*of_input, recomputed=True)
        assert self._pieces is not None
        pieces, self._pieces = self._pieces, None
        if not self.batch.rows:
            yield from pieces.mlp.backward(dx)
            yield from nothing(self.messages.yields.backward)
            return dx
        d_sum, d_residual = pieces.end.backward(dx)
        d_normed = yield from pieces.mlp.backward(d_sum)
        d_sum, d_residual = pieces.middle.backward(d_residual, d_normed)
        (d_normed,) = pieces.attention.backward((yield from self.messages.reduce_output_backward(d_sum)))
        d_normed = yield from self.messages.gather_input_backward(d_normed)
        return pieces.begin.backward(d_residual, d_normed)[0]

    def _compute(
        self, x: Tensor, input_needs_grad: bool, recomputed: bool = False
    ) -> CollectiveGenerator[tuple[Tensor, bool]]:
        layer, pieces = self.layer, _Pieces(self.anchor, self._cut_mlp(recomputed))
        self._pieces = pieces
        if not self.batch.rows:
            yield from nothing(self.messages.yields.forward)
            _, output_needs_grad = yield from pieces.mlp.forward(x, input_needs_grad)
            return x, output_needs_grad or input_needs_grad
        residual, normed = before_attention(layer, pieces.begin.input(x, input_needs_grad))
        x, input_needs_grad = pieces.begin.output(residual)
        normed = yield from self.messages.gather_input(pieces.begin.output(normed)[0])
        partial, output_needs_grad = self._attend(pieces.attention, normed, input_needs_grad)
        summed = yield from self.messages.reduce_output(partial)
        x, normed, input_needs_grad = self._join_and_norm(
            pieces.middle, (summed, output_needs_grad), (x, input_needs_grad)
        )
        summed, output_needs_grad = yield from pieces.mlp.forward(normed, input_needs_grad)
        return self._join(pieces.end, (summed, output_needs_grad), (x, input_needs_grad))

    def _cut_mlp(self, recomputed: bool) -> CutMlp:
        mlp = self.layer.mlp
        if isinstance(mlp, MoELayer):
            return CutExperts(mlp, self._rows, self.anchor, self.exchanged, recomputed)
        return _DividedMlp(mlp, self._rows, self.anchor, self.messages)

    def _attend(self, piece: Piece, normed: Tensor, input_needs_grad: bool) -> tuple[Tensor, bool]:
        attention = self.layer.self_attention
        spreads = attention if isinstance(attention, LatentAttention) else attention.linear_qkv
        with without_collectives(spreads, attention.linear_proj):
            partial, _ = attend(self.layer, piece.input(normed, input_needs_grad), self.angles)
        return piece.output(partial)

    def _join_and_norm(
        self, piece: Piece, summed: tuple[Tensor, bool], residual: tuple[Tensor, bool]
    ) -> tuple[Tensor, Tensor, bool]:
        layer, label_rows = self.layer, self.batch.label_rows if self.labelled_only else None
        output = finished(layer.self_attention.linear_proj, piece.input(*summed))
        x, normed = before_mlp(layer, output, piece.input(*residual), label_rows)
        x, input_needs_grad = piece.output(x)
        return x, piece.output(normed)[0], input_needs_grad

    def _join(
        self, piece: Piece, summed: tuple[Tensor, bool], residual: tuple[Tensor, bool]
    ) -> tuple[Tensor, bool]:
        layer = self.layer
        output: tuple[Tensor, Tensor | None] = piece.input(*summed), None
        if not isinstance(layer.mlp, MoELayer):
            with activate(self._rows):
                output = finished(layer.mlp.linear_fc2, output[0])
        x = after_mlp(layer, output, piece.input(*residual))
        return piece.output(x if self.last_norm is None else self.last_norm(x))

    @property
    def _rows(self) -> PackedBatch:
        """The rows of the MLP."""
        return self.batch.labelled if self.labelled_only else self.batch


class _DividedMlp:
    """An MLP that tensor ranks divide; see `CutMlp`."""

    def __init__(self, mlp: Any, batch: PackedBatch, anchor: Tensor, messages: TensorMessages) -> None:
        self._mlp, self._batch, self._messages = mlp, batch, messages
        self._piece = Piece(anchor)

    def forward(self, normed: Tensor, input_needs_grad: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """See `CutMlp.forward`."""
        normed = yield from self._messages.gather_input(normed)
        with activate(self._batch), without_collectives(self._mlp.linear_fc1, self._mlp.linear_fc2):
            partial, _ = self._mlp(self._piece.input(normed, input_needs_grad))
        partial, output_needs_grad = self._piece.output(partial)
        return (yield from self._messages.reduce_output(partial)), output_needs_grad

    def backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """See `CutMlp.backward`."""
        (d_normed,) = self._piece.backward((yield from self._messages.reduce_output_backward(gradient)))
        return (yield from self._messages.gather_input_backward(d_normed))


class _Pieces:
    """The pieces of a layer, between its messages."""

    def __init__(self, anchor: Tensor, mlp: CutMlp) -> None:
        self.begin, self.attention, self.middle, self.end = (Piece(anchor) for _ in range(4))
        self.mlp = mlp


def yields_of(layer: Any, messages: TensorMessages) -> Yields:
    """How often a layer's generators yield, whatever its rows; see `LayerPieces`."""
    mlp = getattr(layer, "mlp", None)  # an expert manager lacks those without experts
    return messages.yields + (CutExperts.yields(mlp) if isinstance(mlp, MoELayer) else messages.yields)


def finished(module: Any, summed: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a row-parallel BaseOp returns once its output has been summed: with its adapters, and its skipped bias."""
    finish = vars(module).get("finish")
    return (summed, module.bias) if finish is None else finish(summed)
