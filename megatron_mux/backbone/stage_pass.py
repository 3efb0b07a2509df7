"""A micro-batch's way through a stage, forward and backward, with its messages left to the caller.

Shapes: T rows of the micro-batch on this rank, N labelled ones, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_mux.backbone.layer_pieces import LayerPieces
from megatron_mux.backbone.pieces import CollectiveGenerator, Yields, nothing
from megatron_mux.backbone.weight_offload import Key, WeightOffload


@dataclass(frozen=True)
class Pieces:
    """Pieces of a pass through a stage: one more than it has messages.

    Attributes:
        forward, backward: Of a forward and of a backward pass.
    """

    forward: int
    backward: int

    @classmethod
    def between(cls, messages: Sequence[Yields]) -> Pieces:
        """Those between the messages of layers."""
        return cls(sum(own.forward for own in messages) + 1, sum(own.backward for own in messages) + 1)


class StagePass:
    """The layers of a stage on one micro-batch; made by `Backbone.begin`.

    How often `forward` and `backward` yield depends on the layers alone: see `Backbone.pieces`.

    Args:
        layers: Of the stage; None where this rank has nothing to compute.
        trained_from: The first layer of the stage with an adapter.
        messages: How often each layer yields, each way; those of recomputation count as backward.
    """

    def __init__(
        self,
        layers: Sequence[LayerPieces | None],
        offload: WeightOffload,
        trained_from: int,
        messages: Sequence[Yields],
    ) -> None:
        self._layers = layers
        self._offload = offload
        self._trained_from = trained_from
        self._messages = messages

    def forward(self, hidden: Tensor, input_needs_grad: bool) -> CollectiveGenerator[tuple[Tensor, bool]]:
        """Compute the layers.

        Args:
            hidden: `[T, 1, H]`.
            input_needs_grad: Whether `backward` is to return its gradient.

        Returns:
            `[T, 1, H]`, or `[N, 1, H]` where the last layer computes labelled rows only; and whether it needs a
            gradient.
        """
        hidden = hidden.detach()
        for i, layer in enumerate(self._layers):
            following: Key = i + 1 if i + 1 < len(self._layers) else "head"
            with self._offload.using(i, following):
                if layer is None:
                    yield from nothing(self._messages[i].forward)
                else:
                    hidden, input_needs_grad = yield from layer.forward(hidden, input_needs_grad)
        return hidden, input_needs_grad

    def backward(self, gradient: Tensor | None, to_input: bool) -> CollectiveGenerator[Tensor | None]:
        """Back-propagate to the adapters.

        Args:
            gradient: Like the output of `forward`; None for zero.
            to_input: Whether an earlier stage needs the gradient of the input.

        Returns:
            The gradient of the input, if it is needed.
        """
        lowest = 0 if to_input else self._trained_from
        for i, layer in reversed(list(enumerate(self._layers))):
            if i < lowest:
                yield from nothing(self._messages[i].backward)
                continue
            with self._offload.using(i, i - 1 if i > lowest else None):
                if layer is None or gradient is None or not layer.output_needs_grad:
                    yield from nothing(self._messages[i].backward)
                else:
                    gradient = yield from layer.backward(gradient)
        return gradient if to_input else None
