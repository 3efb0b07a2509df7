"""What the loss under the output layer takes, as closed forms (`kernels.loss_head`, `kernels.own_output`).

Shapes: B micro-batches, K tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.kernels.loss_head import chunk_rows
from megatron_mux.kernels.own_output import ROWS_AT_ONCE
from megatron_mux.memory.forms.engine_layer import EngineLayer
from megatron_mux.memory.forms.task_adapters import TaskAdapters

Array = npt.NDArray[np.float64]


def loss_bytes(
    layer: EngineLayer, tasks: Sequence[TaskAdapters], present: npt.NDArray[np.bool_], labels: Array
) -> tuple[Array, Array]:
    """Memory of the loss on a tensor rank.

    Args:
        layer: Any layer of the backbone.
        tasks: The adapters.
        present: `[B, K]` whether a micro-batch has rows of a task.
        labels: `[B]` labelled rows.

    Returns:
        `[B]` bytes of hidden states and their gradient, and `[B]` of a chunk of logits.
    """
    vocabulary = -(-layer.architecture.vocabulary // layer.tensor)
    hidden = layer.architecture.hidden * layer.size
    # Logits; torch's operators also have them in fp32 (fp64 for fp64), and rounded again for the product.
    logit = layer.size if layer.size >= 4 or layer.device == "cuda" else 4 + 2 * layer.size
    chunk = np.minimum(labels, chunk_rows(layer.device, vocabulary))
    own = np.zeros_like(chunk)
    for task, here in zip(tasks, present.T, strict=True):
        if not task.head_rows:
            continue
        rows = min(task.head_rows, vocabulary)
        # Scaled hidden states, and the product that is added to the gradient of the task's rows; it is gone when the
        # gradient of hidden states comes.
        product = min(rows, ROWS_AT_ONCE[layer.device]) * hidden * (layer.size < 4)
        more = np.maximum(product, chunk * hidden)
        if (
            task.head_rows < layer.architecture.vocabulary
        ):  # gradients of their logits are picked from the others
            more = more + chunk * rows * layer.size
        own = np.maximum(own, here * more)
    return (labels + chunk) * hidden, chunk * vocabulary * logit + own
