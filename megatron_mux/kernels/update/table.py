"""Parameters of many tasks that step together, as kernels take them; see `update.triton`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_mux.kernels.low_rank.terms import address, bits
from megatron_mux.runtime import to_device

TILE = 1024
"""Elements that a program updates."""
LAUNCHES: Mapping[str, int] = {"squared_norms": 2, "update_": 1}
"""Device launches of each operation by Triton kernels at most, however many tasks there are."""
ENTRY = (
    "value",
    "gradient",
    "exp_avg",
    "exp_avg_sq",
    "copy",
    "count",
    "row",
    "weight_decay",
    "counted",
    "rate",
    "aligned",
)
"""Fields of a row of `UpdateTable.entries`: addresses (0: no such tensor), sizes, bits of fp64 numbers, and flags.

`aligned`: whether the piece can be accessed 16 bytes at a time. That is a matter of each piece, so that a task's bits
do not depend on those of others.
"""


def options_of(
    learning_rate: float, beta1: float, beta2: float, epsilon: float, max_norm: float, step: int
) -> list[float]:
    """A task's row of `update_`'s options.

    Args:
        beta1: Of AdamW, like the next two.
        beta2: Likewise.
        epsilon: Likewise.
        max_norm: Gradients are scaled down to this norm; 0: they are not.
        step: Optimizer steps done, this one included.
    """
    return [learning_rate, beta1, beta2, epsilon, 1 - beta1**step, (1 - beta2**step) ** 0.5, max_norm]


@dataclass(frozen=True)
class Piece:
    """A run of one task's parameters.

    Attributes:
        row: Of the task in tables of options and norms.
        value: `[n]` fp32, contiguous, like the next three.
        gradient: Likewise.
        exp_avg, exp_avg_sq: Moments of AdamW; None: SGD without momentum.
        copy: `[n]` of the values in the dtype of the computation; None: not copied.
        weight_decay: Decoupled with AdamW, part of the gradient with SGD.
        rate: The learning rate as a multiple of the task's.
        counted: Whether this rank counts the gradient in the task's norm: one of those that have a replica does.
    """

    row: int
    value: Tensor
    gradient: Tensor
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    copy: Tensor | None = None
    weight_decay: float = 0.0
    rate: float = 1.0
    counted: bool = True


class UpdateTable:
    """The pieces of the tasks that step together; made anew when tasks come or go.

    Args:
        pieces: Those of a task next to each other, tasks by row.

    Attributes:
        pieces: As given: kept, since the table has their addresses.
        entries: `[pieces, fields]` int64 on the device.
        tiles: Number of tiles.
        of_pieces: `[pieces + 1]` int32 on the device: a piece's tiles begin here and end where the next one's begin.
        of_rows: `[rows + 1]` int32 on the device, likewise of tasks.
        copy_type: dtype of the copies.
    """

    def __init__(self, pieces: Sequence[Piece], rows: int) -> None:
        device = pieces[0].value.device
        assert all(a.row <= b.row for a, b in zip(pieces, pieces[1:], strict=False))
        tiles = [-(-piece.value.numel() // TILE) for piece in pieces]
        of_rows = [0] * rows
        for piece, count in zip(pieces, tiles, strict=True):
            of_rows[piece.row] += count
        entries = [_entry(piece) for piece in pieces]
        self.pieces = tuple(pieces)
        self.rows = rows
        self.entries = to_device(torch.tensor(entries), device)
        self.tiles = sum(tiles)
        self.of_pieces, self.of_rows = (
            to_device(torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32), device)
            for counts in (tiles, of_rows)
        )
        copies = {piece.copy.dtype for piece in pieces if piece.copy is not None} or {torch.float32}
        (self.copy_type,) = copies


def _entry(piece: Piece) -> list[int]:
    tensors = (piece.value, piece.gradient, piece.exp_avg, piece.exp_avg_sq, piece.copy)
    assert all(t is None or (t.is_contiguous() and t.numel() == piece.value.numel()) for t in tensors)
    assert all(t is None or t.dtype == torch.float32 for t in tensors[:-1])
    numbers = piece.value.numel(), piece.row, bits(piece.weight_decay), int(piece.counted), bits(piece.rate)
    aligned = not (piece.value.numel() % 8 or any(address(t) % 16 for t in tensors))
    return [*map(address, tensors), *numbers, int(aligned)]
