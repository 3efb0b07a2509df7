"""Bytes of the engine's ranks: those that last, and those of micro-batches. See `engine_memory`.

Shapes: B micro-batches, S stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Lasting(NamedTuple):
    """`[S]` bytes of each stage's ranks that last from step to step.

    Attributes:
        parameters: The backbone's weights between uses.
        in_use: Weights gathered or loaded for use, if they are kept elsewhere, of two neighbouring units; and those of
            one that are dequantised.
        head_in_use: The same for the output layer, while the loss is computed.
        adapters: Values of all tasks' adapters, and copies of them in the backbone's dtype.
        gradients: Their gradients.
        moments: Their optimizers' states, and the buffers of their steps.
        buffer: The buffer in which gradients are summed over ranks.
    """

    parameters: Array
    in_use: Array
    head_in_use: Array
    adapters: Array
    gradients: Array
    moments: Array
    buffer: Array

    @property
    def total(self) -> Array:
        """`[S]` bytes of all of them; weights of the output layer are in use when others are not."""
        return sum((part for part in self if part is not self.head_in_use), start=np.zeros(1))


class Passes(NamedTuple):
    """`[B, S]` bytes of micro-batches.

    Attributes:
        kept: From the forward to the backward pass.
        loss: Hidden states, and their gradient, while the loss is computed; zero but on the last stage.
        logits: A chunk of logits and its copies, likewise.
        workspace: Temporary tensors of a layer's backward pass.
        recomputed: The layer that is recomputed for its backward pass.
        messages: Hidden states and gradients received before their use, or sent and not freed yet.
        fragmentation: Share of all these that the allocator needs on top.
    """

    kept: Array
    loss: Array
    logits: Array
    workspace: Array
    recomputed: Array
    messages: Array
    fragmentation: float

    @property
    def lasting(self) -> Array:
        """Bytes held while the micro-batch is in flight, fragmentation included."""
        return self.kept * (1 + self.fragmentation)

    @property
    def working(self) -> Array:
        """The most further bytes held while it is computed, fragmentation included."""
        backward = self.workspace + self.recomputed
        return (np.maximum(backward, self.loss + self.logits) + self.messages) * (1 + self.fragmentation)
