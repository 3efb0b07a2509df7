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
from megatron_mux.batch.micro_batch import MicroBatch, activate


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

    def spread(self, normed: Tensor) -> CollectiveGenerator[Tensor]:
        """Its input: all rows."""
        if not self.divided:
            # As Megatron does: the strides of a view decide which product a matrix library computes, to the bit.
            return normed.view_as(normed)
        if not self.sequence_parallel:
            return normed
        return received((yield Message("all_gather", normed)))

    def spread_backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """The input's gradient, summed."""
        if not self.divided:
            return gradient
        return (yield None if gradient is None else Message(self._summing, gradient))

    def sum(self, partial: Tensor) -> CollectiveGenerator[Tensor]:
        """Its output, summed."""
        return received((yield Message(self._summing, partial))) if self.divided else partial

    def sum_backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
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
        trained: Whether the output of `forward` needs a gradient.
    """

    layer: Any
    batch: MicroBatch
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
        self.trained = False

    def forward(self, x: Tensor, needed: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """Compute the layer.

        Args:
            x: `[T, 1, H]`, without a gradient of its own.
            needed: Whether `backward` is to return its gradient.

        Returns:
            `[T, 1, H]`, or `[N, 1, H]` with `labelled_only`; and whether it needs a gradient.
        """
        output, self.trained = yield from self._compute(x, needed)
        if self.recompute or not self.trained:
            self._pieces = None
        if self.recompute and self.trained:
            self._input = x, needed
        return output, self.trained

    def backward(self, dx: Tensor) -> CollectiveGenerator[Tensor | None]:
        """Back-propagate the output's gradient to the adapters. Returns the input's gradient if that is needed."""
        if self._input is not None:
            again, self._input = self._input, None
            yield from self._compute(*again, again=True)
        assert self._pieces is not None
        pieces, self._pieces = self._pieces, None
        if not self.batch.rows:
            yield from pieces.mlp.backward(dx)
            yield from nothing(self.messages.yields.backward)
            return dx
        d_sum, d_residual = pieces.end.backward(dx)
        d_normed = yield from pieces.mlp.backward(d_sum)
        d_sum, d_residual = pieces.middle.backward(d_residual, d_normed)
        (d_normed,) = pieces.attention.backward((yield from self.messages.sum_backward(d_sum)))
        d_normed = yield from self.messages.spread_backward(d_normed)
        return pieces.begin.backward(d_residual, d_normed)[0]

    def _compute(
        self, x: Tensor, needed: bool, again: bool = False
    ) -> CollectiveGenerator[tuple[Tensor, bool]]:
        layer, pieces = self.layer, _Pieces(self.anchor, self._cut_mlp(again))
        self._pieces = pieces
        if not self.batch.rows:
            yield from nothing(self.messages.yields.forward)
            _, trained = yield from pieces.mlp.forward(x, needed)
            return x, trained or needed
        residual, normed = before_attention(layer, pieces.begin.input(x, needed))
        x, needed = pieces.begin.output(residual)
        normed = yield from self.messages.spread(pieces.begin.output(normed)[0])
        partial, trained = self._attend(pieces.attention, normed, needed)
        summed = yield from self.messages.sum(partial)
        x, normed, needed = self._join_and_norm(pieces.middle, (summed, trained), (x, needed))
        summed, trained = yield from pieces.mlp.forward(normed, needed)
        return self._join(pieces.end, (summed, trained), (x, needed))

    def _cut_mlp(self, again: bool) -> CutMlp:
        mlp = self.layer.mlp
        if isinstance(mlp, MoELayer):
            return CutExperts(mlp, self._rows, self.anchor, self.exchanged, again)
        return _DividedMlp(mlp, self._rows, self.anchor, self.messages)

    def _attend(self, piece: Piece, normed: Tensor, needed: bool) -> tuple[Tensor, bool]:
        attention = self.layer.self_attention
        spreads = attention if isinstance(attention, LatentAttention) else attention.linear_qkv
        with without_collectives(spreads, attention.linear_proj):
            partial, _ = attend(self.layer, piece.input(normed, needed), self.angles)
        return piece.output(partial)

    def _join_and_norm(
        self, piece: Piece, summed: tuple[Tensor, bool], residual: tuple[Tensor, bool]
    ) -> tuple[Tensor, Tensor, bool]:
        layer, label_rows = self.layer, self.batch.label_rows if self.labelled_only else None
        output = finished(layer.self_attention.linear_proj, piece.input(*summed))
        x, normed = before_mlp(layer, output, piece.input(*residual), label_rows)
        x, needed = piece.output(x)
        return x, piece.output(normed)[0], needed

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
    def _rows(self) -> MicroBatch:
        """The rows of the MLP."""
        return self.batch.labelled if self.labelled_only else self.batch


class _DividedMlp:
    """An MLP that tensor ranks divide; see `CutMlp`."""

    def __init__(self, mlp: Any, batch: MicroBatch, anchor: Tensor, messages: TensorMessages) -> None:
        self._mlp, self._batch, self._messages = mlp, batch, messages
        self._piece = Piece(anchor)

    def forward(self, normed: Tensor, needed: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """See `CutMlp.forward`."""
        normed = yield from self._messages.spread(normed)
        with activate(self._batch), without_collectives(self._mlp.linear_fc1, self._mlp.linear_fc2):
            partial, _ = self._mlp(self._piece.input(normed, needed))
        partial, trained = self._piece.output(partial)
        return (yield from self._messages.sum(partial)), trained

    def backward(self, gradient: Tensor | None) -> CollectiveGenerator[Tensor | None]:
        """See `CutMlp.backward`."""
        (d_normed,) = self._piece.backward((yield from self._messages.sum_backward(gradient)))
        return (yield from self._messages.spread_backward(d_normed))


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
