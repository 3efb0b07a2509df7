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
        parameters: The backbone's weights.
        adapters: Values of all tasks' adapters, and copies of them in the backbone's dtype.
        gradients: Their gradients.
        moments: Their optimizers' states, and the buffers of their steps.
    """

    parameters: Array
    adapters: Array
    gradients: Array
    moments: Array


class Passes(NamedTuple):
    """`[B, S]` bytes of micro-batches.

    Attributes:
        kept: From the forward to the backward pass.
        workspace: Temporary tensors of a layer's backward pass.
    """

    kept: Array
    workspace: Array
