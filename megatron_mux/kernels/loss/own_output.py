"""Logits and gradients of labelled rows whose task trains rows of the output layer itself.

All rows of a call belong to one task, so its NaN stays its own.
Shapes: n labelled rows, V vocabulary (this rank's part), R rows of the output layer that the task trains, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.kernels.own_rows import OwnRows

ROWS_AT_ONCE = {"cpu": 3072, "cuda": 1 << 16}
"""Rows of the output layer per product of its gradient: a temporary tensor of so many rows comes and goes."""


def write_logits(rows: OwnRows, start: int, hidden: Tensor, logits: Tensor) -> None:
    """Overwrite the logits of the tokens that a task trains rows for, if these are not all.

    Args:
        start: The first token of this rank's part.
        hidden: `[n, H]`.
        logits: `[n, V]` under the backbone's output layer.
    """
    if rows.tokens is not None:
        logits.index_copy_(1, rows.tokens[rows.held] - start, torch.mm(hidden, rows.values[rows.held].t()))


def back_propagate(
    rows: OwnRows, start: int, weight: Tensor, gradient: Tensor, hidden: Tensor, factor: Tensor
) -> Tensor:
    """The hidden states' gradient; adds to that of the task's rows.

    Args:
        start: The first token of this rank's part.
        weight: `[V, H]` the output layer: of the task if it has all of it, else of the backbone.
        gradient: `[n, V]` of the logits before they are multiplied by `factor`; it is overwritten.
        hidden: `[n, H]`.
        factor: `[n, 1]`, fp32 at least.

    Returns:
        `[n, H]`, of this rank's tokens only.
    """
    scaled = (hidden * factor).to(hidden.dtype)
    if rows.tokens is None:
        step = ROWS_AT_ONCE[weight.device.type]
        for first in range(0, weight.shape[0], step):
            part = slice(first, first + step)
            _add_product(rows.gradient[part], gradient[:, part], scaled)
        return torch.mm(gradient, weight).mul_(factor)
    columns = rows.tokens[rows.held] - start
    chosen = gradient.index_select(1, columns)
    gradient.index_fill_(1, columns, 0.0)
    _add_product(rows.gradient[rows.held], chosen, scaled)
    return torch.mm(gradient, weight).addmm_(chosen, rows.values[rows.held]).mul_(factor)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Add `[R, H]` of rows with gradients `[n, R]` of their logits; sums are kept in the precision of `total`."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
    else:
        total.add_(torch.mm(gradient.t(), hidden))
