"""Squared norms and optimizer steps of many tasks at once by Triton kernels: two launches and one, however many tasks.

Parameters, gradients and moments lie in flat fp32 storages. A table has the addresses of their *pieces*: runs of one
task's parameters that are updated alike. Tasks meet nowhere: norms are summed over each task's own pieces in their own
order, and a task that skips its step is left out by selection, so that its NaN changes no one, itself included.

A program takes the path of its own piece: accesses of 16 bytes if the piece is aligned, as flat parameters are, single
ones if not. Values meet behind the branch only, so that sums have one order in either case.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.low_rank.triton_device import _number, _pointer
from megatron_mux.kernels.triton_launch import launch
from megatron_mux.kernels.update.table import ENTRY, TILE, UpdateTable

_FIELDS = tl.constexpr(len(ENTRY))
(
    _VALUE, _GRADIENT, _EXP_AVG, _EXP_AVG_SQ, _COPY, _COUNT, _ROW, _WEIGHT_DECAY, _COUNTED, _RATE_FACTOR, _ALIGNED,
) = map(tl.constexpr, range(len(ENTRY)))  # fmt: skip
_RATE, _BETA1, _BETA2, _EPSILON, _CORRECTION1, _CORRECTION2, _MAX_NORM = map(tl.constexpr, range(7))
_OPTIONS = tl.constexpr(7)


def squared_norms(table: UpdateTable) -> Tensor:
    """Each task's squared norm over its gradients that this rank counts: `[rows]` fp64."""
    squares = torch.empty(max(table.tiles, 1), dtype=torch.float64, device=table.entries.device)
    norms = torch.empty(table.rows, dtype=torch.float64, device=table.entries.device)
    if table.tiles:
        arguments = squares, table.entries, table.of_pieces, len(table.pieces)
        launch(_tile_squares, (table.tiles,), arguments, {"TILE": TILE, "num_warps": 4})
    launch(_row_sums, (table.rows,), (norms, squares, table.of_rows), {"WIDTH": 128, "num_warps": 1})
    return norms


def update_(table: UpdateTable, settings: Tensor, norms: Tensor, skip: Tensor) -> None:
    """Clip gradients, step, write the copies and zero the gradients of all tasks.

    Args:
        settings: `[rows, 7]` fp64 on the device, of `options_of`.
        norms: `[rows]` fp64, the norm of each task's gradient over all ranks.
        skip: `[rows]` bool: where it is true, values, moments and copies stay as they are. The gradient is zeroed all
            the same.
    """
    if table.tiles:
        copy_type = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
        constants = {
            "COPY": copy_type[table.copy_type],
            "TILE": TILE,
            "num_warps": 4,
        }
        arguments = (
            table.entries, table.of_pieces, len(table.pieces), settings, norms, skip.view(torch.uint8),
        )  # fmt: skip
        launch(_update, (table.tiles,), arguments, constants)


@triton.jit
def _tile(entries, of_pieces, pieces, TILE: tl.constexpr):
    """The entry of this program's tile, and the place of the tile's first element in the piece: by bisection."""
    tile = tl.program_id(0)
    low = tile * 0
    high = low + pieces
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(of_pieces + middle) <= tile:
            low = middle
        else:
            high = middle
    return entries + low * _FIELDS, (tile - tl.load(of_pieces + low)).to(tl.int64) * TILE


@triton.jit
def _places(first, TILE: tl.constexpr):
    """Of a tile's elements in its piece. Within a branch, so that either has the layout that suits its accesses."""
    return tl.multiple_of(first, TILE) + tl.arange(0, TILE)


@triton.jit
def _count(entry, ALIGNED: tl.constexpr):
    """Elements of a piece, int64: one task's flat parameters may have 2^31 or more."""
    count = tl.load(entry + _COUNT)
    return tl.multiple_of(count, 8) if ALIGNED else count


@triton.jit
def _counted_gradient(entry, first, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    places = _places(first, TILE)
    # Not the product with zero: a gradient that is not counted may be infinite.
    count = tl.where(tl.load(entry + _COUNTED) != 0, _count(entry, ALIGNED), 0)
    return tl.load(_pointer(entry, _GRADIENT, tl.float32, ALIGNED) + places, mask=places < count, other=0.0)


@triton.jit
def _tile_squares(squares, entries, of_pieces, pieces, TILE: tl.constexpr):
    """The sum of squares of each tile's gradient."""
    entry, first = _tile(entries, of_pieces, pieces, TILE)
    if tl.load(entry + _ALIGNED) != 0:
        gradient = _counted_gradient(entry, first, True, TILE)
    else:
        gradient = _counted_gradient(entry, first, False, TILE)
    wide = gradient.to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(wide * wide))


@triton.jit
def _row_sums(sums, values, first, WIDTH: tl.constexpr):
    """The sum of each row's values, in their order."""
    start = tl.load(first + tl.program_id(0))
    stop = tl.load(first + tl.program_id(0) + 1)
    total = tl.zeros((WIDTH,), dtype=tl.float64)
    for at in range(start, stop, WIDTH):
        places = at + tl.arange(0, WIDTH)
        total += tl.load(values + places, mask=places < stop, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def _option(settings, row, field: tl.constexpr):
    return tl.load(settings + row * _OPTIONS + field)


@triton.jit
def _update(
    entries, of_pieces, pieces, settings, norms, skip, COPY: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One tile's step."""
    entry, first = _tile(entries, of_pieces, pieces, TILE)
    if tl.load(entry + _ALIGNED) != 0:
        _step(entry, first, settings, norms, skip, COPY, True, TILE)
    else:
        _step(entry, first, settings, norms, skip, COPY, False, TILE)


@triton.jit
def _step(
    entry, first, settings, norms, skip, COPY: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The arithmetic of `torch.optim.AdamW(fused=True)` and `clip_grad_norm_`."""
    places = _places(first, TILE)
    mask = places < _count(entry, ALIGNED)
    row = tl.load(entry + _ROW).to(tl.int32)
    gradients = _pointer(entry, _GRADIENT, tl.float32, ALIGNED) + places
    gradient = tl.load(gradients, mask=mask, other=0.0)
    if tl.load(skip + row) == 0:
        limit = _option(settings, row, _MAX_NORM)
        if limit > 0:
            factor = limit / (tl.load(norms + row) + 1e-6)
            gradient *= tl.where(factor < 1, factor, 1.0).to(tl.float32)
        values = _pointer(entry, _VALUE, tl.float32, ALIGNED) + places
        value = tl.load(values, mask=mask, other=0.0)
        decay = _number(entry, _WEIGHT_DECAY)
        rate = _option(settings, row, _RATE) * _number(entry, _RATE_FACTOR)
        if tl.load(entry + _EXP_AVG) != 0:
            value -= (rate * decay).to(tl.float32) * value
            value -= _adam_step(entry, places, mask, gradient, settings, row, rate, ALIGNED)
        else:
            value -= rate.to(tl.float32) * (gradient + decay * value)
        tl.store(values, value, mask=mask)
        if tl.load(entry + _COPY) != 0:
            tl.store(_pointer(entry, _COPY, COPY, ALIGNED) + places, value.to(COPY), mask=mask)
    # Zeros do not depend on what was loaded, and a thread may store others' elements: loads and stores differ in width.
    tl.debug_barrier()
    tl.store(gradients, tl.zeros((TILE,), dtype=tl.float32), mask=mask)


@triton.jit
def _adam_step(entry, places, mask, gradient, settings, row, rate, ALIGNED: tl.constexpr):
    """Update the moments, and what to subtract from the values."""
    first = _pointer(entry, _EXP_AVG, tl.float32, ALIGNED) + places
    second = _pointer(entry, _EXP_AVG_SQ, tl.float32, ALIGNED) + places
    beta1 = _option(settings, row, _BETA1)
    beta2 = _option(settings, row, _BETA2)
    mean = beta1.to(tl.float32) * tl.load(first, mask=mask, other=0.0) + (1 - beta1).to(tl.float32) * gradient
    square = tl.load(second, mask=mask, other=0.0)
    square = beta2.to(tl.float32) * square + (1 - beta2).to(tl.float32) * gradient * gradient
    tl.store(first, mean, mask=mask)
    tl.store(second, square, mask=mask)
    scale = tl.sqrt(square) / _option(settings, row, _CORRECTION2).to(tl.float32)
    size = (rate / _option(settings, row, _CORRECTION1)).to(tl.float32)
    return size * mean / (scale + _option(settings, row, _EPSILON).to(tl.float32))
