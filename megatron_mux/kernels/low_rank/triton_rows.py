"""Device code of `low_rank.triton`: activations of bottlenecks, and factors, on the rows of each task.

Constants as in `low_rank.triton_device`. A program owns a block of its output; it reads and writes rows of its own task
only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_mux.kernels.low_rank.triton_device import (
    _ACTIVATION,
    _BY_MICRO_BATCH,
    _BY_TABLE,
    _COLUMN_COUNT,
    _DOWN_BIAS,
    _LATENT,
    _RANK,
    _UP_FACTORS,
    _UP_FACTORS_GRADIENT,
    _add_to,
    _factors_of,
    _integer,
    _multiple,
    _places_of,
    _pointer,
    _rows_of,
    _sum_rows,
    _term_of,
)


@triton.jit
def _activated(activation, x):
    """An activation of fp32 values and its derivative. NaN stays NaN."""
    if activation == 0:
        value = tl.where(x <= 0, 0.0, x)
        slope = tl.where(x <= 0, 0.0, 1.0)
    elif activation == 1:
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif activation == 2:
        gate = tl.sigmoid(x)
        value = x * gate
        slope = gate * (1.0 + x * (1.0 - gate))
    else:
        value = 2.0 * tl.sigmoid(2.0 * x) - 1.0
        slope = 1.0 - value * value
    return value, slope


@triton.jit(do_not_specialize=_BY_TABLE, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def activation_kernel(
    entries, first_entry, slots, latent, hidden, d_latent, tiles, row_ranges, rank_blocks, stride,
    BACKWARD: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """`activation(latent + bias)` to `hidden`; BACKWARD: `d_latent` times the derivative, too."""
    tile = tiles + tl.program_id(0) * 3
    number = tl.program_id(1) // rank_blocks
    entry, exists = _term_of(entries, first_entry, slots, row_ranges + tl.load(tile) * 4, number)
    if not exists:
        return
    rank = _multiple(entry, _RANK, ALIGNED)
    first_rank = tl.program_id(1) % rank_blocks * RANKS
    if first_rank >= rank:
        return
    ranks = first_rank + tl.arange(0, RANKS)
    rows, row_mask = _rows_of(tile, ROWS)
    mask = row_mask[:, None] & (ranks < rank)[None, :]
    places = rows.to(tl.int64)[:, None] * stride + (_multiple(entry, _LATENT, ALIGNED) + ranks)[None, :]
    bias = _pointer(entry, _DOWN_BIAS, latent.dtype.element_ty, ALIGNED)
    block = tl.load(latent + places, mask=mask, other=0.0).to(tl.float32)
    block += tl.load(bias + ranks, mask=ranks < rank, other=0.0).to(tl.float32)[None, :]
    value, slope = _activated(_integer(entry, _ACTIVATION), block)
    tl.store(hidden + places, value.to(hidden.dtype.element_ty), mask=mask)
    if BACKWARD:
        gradient = tl.load(d_latent + places, mask=mask, other=0.0).to(tl.float32) * slope
        tl.store(d_latent + places, gradient.to(d_latent.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_BY_TABLE, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def scale_kernel(
    entries, first_entry, slots, values, tiles, row_ranges, stride,
    FACTORS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Columns times their factors: a program for a tile, a column block and a term."""
    tile = tiles + tl.program_id(0) * 3
    entry, exists = _term_of(entries, first_entry, slots, row_ranges + tl.load(tile) * 4, tl.program_id(2))
    if not exists:
        return
    count = _multiple(entry, _COLUMN_COUNT, 8 if ALIGNED else 0)
    if tl.program_id(1) * WIDTH >= count:
        return
    features = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    rows, row_mask = _rows_of(tile, ROWS)
    mask = row_mask[:, None] & (features < count)[None, :]
    places = _places_of(values, stride, entry, rows, features, count, True, ALIGNED)
    factors = _factors_of(entry, _UP_FACTORS, features, count, FACTORS)
    block = tl.load(places, mask=mask, other=0.0).to(tl.float32) * factors[None, :]
    tl.store(places, block.to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_BY_TABLE, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def factor_gradient_kernel(
    entries, first_entry, slots, values, gradient, row_ranges, stride, gradient_stride,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sums over a task's rows, in their order: a program for a column block, a group and a term."""
    group = row_ranges + tl.program_id(1) * 4
    first = tl.load(group + 1)
    stop = tl.load(group + 2)
    entry, exists = _term_of(entries, first_entry, slots, group, tl.program_id(2))
    if (not exists) | (first >= stop):
        return
    count = _multiple(entry, _COLUMN_COUNT, 8 if ALIGNED else 0)
    if tl.program_id(0) * WIDTH >= count:
        return
    features = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for start in range(first, stop, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < stop)[:, None] & (features < count)[None, :]
        block = tl.load(
            _places_of(values, stride, entry, rows, features, count, True, ALIGNED), mask=mask, other=0.0
        )
        back = tl.load(
            _places_of(gradient, gradient_stride, entry, rows, features, count, True, ALIGNED),
            mask=mask,
            other=0.0,
        )
        total += block.to(tl.float32) * back.to(tl.float32)
    places = _pointer(entry, _UP_FACTORS_GRADIENT, tl.float32, False) + features
    _add_to(places, features < count, _sum_rows(total))
