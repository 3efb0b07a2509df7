"""Device code of `experts.triton`: the product, and three kernels that compute LoRAs forward and backward.

A program owns a block of its output, so nothing is added atomically. It reads rows of one expert and task; entries of
its block that lie outside are loaded as zeros and never stored.

Constants: ROWS rows, WIDTH columns, RANKS ranks and INNER summed columns of a block. UP: the kernel computes with B and
the output's columns, otherwise with A and the input's. PRECISION: of fp32 products.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_mux.kernels.experts.terms import FIELDS

_COUNT = tl.constexpr(len(FIELDS))
_DOWN, _UP, _DOWN_GRADIENT, _UP_GRADIENT, _RANK, _EXPERTS, _SCALE = map(tl.constexpr, range(len(FIELDS)))

_VARIES = ["groups", "slots", "held", "columns", "rank_blocks"]
"""Numbers that change as tasks come and go: kernels specialised on them would be compiled anew within a run."""
_VIEWS = ["entries", "at", "group_of", "start", "stop", "last"]
"""Tables, whose alignment does not matter."""


@triton.jit
def _rows_of(number, group_of, start, stop, last, groups):
    """The group of a tile, its number within the group, and whether there is such a tile."""
    group = tl.load(group_of + number)
    exists = group < groups
    before = tl.load(last + group - 1, mask=exists & (group > 0), other=0)
    return group, number - before, exists


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=_VIEWS)
def product_kernel(
    y, x, weight, group_of, start, stop, last, groups, columns, width, inner, y_stride, x_stride,
    group_stride, out_stride, in_stride,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Rows times the transposed matrix of their expert: a program for a tile and a column block."""
    group, within, exists = _rows_of(tl.program_id(0) // columns, group_of, start, stop, last, groups)
    if not exists:
        return
    rows = tl.load(start + group) + within * ROWS + tl.arange(0, ROWS)
    row_mask = rows < tl.load(stop + group)
    out = tl.program_id(0) % columns * WIDTH + tl.arange(0, WIDTH)
    out_mask = out < width
    features = tl.arange(0, INNER)
    values = x + (rows.to(tl.int64)[:, None] * x_stride + features[None, :])
    matrix = weight + (
        group.to(tl.int64) * group_stride + (features[:, None] * in_stride + out[None, :] * out_stride)
    )
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first in range(0, inner, INNER):
        mask = first + features < inner
        block = tl.load(values, mask=row_mask[:, None] & mask[None, :], other=0.0)
        piece = tl.load(matrix, mask=mask[:, None] & out_mask[None, :], other=0.0)
        total = tl.dot(block, piece, total, input_precision=PRECISION)
        values += INNER
        matrix += INNER * in_stride
    places = rows.to(tl.int64)[:, None] * y_stride + out[None, :]
    tl.store(y + places, total.to(y.dtype.element_ty), mask=row_mask[:, None] & out_mask[None, :])


@triton.jit
def _entry_of(group, entries, at, slots, held):
    """The entry of a group's task, which of the task's experts the group is of, and the rank."""
    slot = group % slots
    entry = entries + slot * _COUNT
    expert = tl.load(at + slot * held + group // slots)
    return entry, expert, tl.load(entry + _RANK).to(tl.int32)


@triton.jit
def _scale_of(entry):
    return tl.load(entry + _SCALE).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _places_of(
    entry, field: tl.constexpr, element: tl.constexpr, expert, rank, ranks, features, width, UP: tl.constexpr
):
    """Where a block of A, or of B transposed, or of their gradients lies: `[RANKS, WIDTH]`."""
    pointer = tl.load(entry + field).to(tl.pointer_type(element))
    pointer = tl.multiple_of(pointer, 16)  # of every parameter: see `adapters.flat_params`
    if UP:
        experts = tl.load(entry + _EXPERTS).to(tl.int32)
        columns = ranks * experts + expert
        places = pointer + (features.to(tl.int64)[None, :] * (rank * experts) + columns[:, None])
    else:
        places = pointer + ((expert * rank + ranks).to(tl.int64)[:, None] * width + features[None, :])
    return places


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=_VIEWS)
def reduce_kernel(
    values, latent, entries, at, group_of, start, stop, last, slots, held, rank_blocks, width, stride, latent_stride,
    UP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Values to latent columns: a program for a tile and a rank block."""
    group, within, exists = _rows_of(
        tl.program_id(0) // rank_blocks, group_of, start, stop, last, slots * held
    )
    if not exists:
        return
    entry, expert, rank = _entry_of(group, entries, at, slots, held)
    first_rank = tl.program_id(0) % rank_blocks * RANKS
    if first_rank >= rank:
        return
    ranks = first_rank + tl.arange(0, RANKS)
    rows = tl.load(start + group) + within * ROWS + tl.arange(0, ROWS)
    row_mask, rank_mask = rows < tl.load(stop + group), ranks < rank
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for first in range(0, width, WIDTH):
        features = first + tl.arange(0, WIDTH)
        mask = features < width
        pointer = values + (rows.to(tl.int64)[:, None] * stride + features[None, :])
        block = tl.load(pointer, mask=row_mask[:, None] & mask[None, :], other=0.0)
        places = _places_of(
            entry, _UP if UP else _DOWN, values.dtype.element_ty, expert, rank, ranks, features, width, UP
        )
        weights = tl.load(places, mask=rank_mask[:, None] & mask[None, :], other=0.0)
        total = tl.dot(block, tl.trans(weights), total, input_precision=PRECISION)
    if UP:
        total *= _scale_of(entry)
    places = latent + (rows.to(tl.int64)[:, None] * latent_stride + ranks[None, :])
    tl.store(places, total.to(latent.dtype.element_ty), mask=row_mask[:, None] & rank_mask[None, :])


@triton.jit
def _add_to(places, mask, total):
    block = tl.load(places, mask=mask, other=0.0)
    tl.store(places, (block.to(tl.float32) + total).to(block.dtype), mask=mask)


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=_VIEWS)
def expand_kernel(
    output, latent, entries, at, group_of, start, stop, last, slots, held, columns, width, stride, latent_stride,
    UP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Latent columns to those of the output, to which they are added: a program for a tile and a column block."""
    group, within, exists = _rows_of(tl.program_id(0) // columns, group_of, start, stop, last, slots * held)
    if not exists:
        return
    entry, expert, rank = _entry_of(group, entries, at, slots, held)
    if rank == 0:
        return
    rows = tl.load(start + group) + within * ROWS + tl.arange(0, ROWS)
    row_mask = rows < tl.load(stop + group)
    features = tl.program_id(0) % columns * WIDTH + tl.arange(0, WIDTH)
    mask = features < width
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first_rank in range(0, rank, RANKS):
        ranks = first_rank + tl.arange(0, RANKS)
        rank_mask = ranks < rank
        pointer = latent + (rows.to(tl.int64)[:, None] * latent_stride + ranks[None, :])
        block = tl.load(pointer, mask=row_mask[:, None] & rank_mask[None, :], other=0.0)
        places = _places_of(
            entry, _UP if UP else _DOWN, latent.dtype.element_ty, expert, rank, ranks, features, width, UP
        )
        weights = tl.load(places, mask=rank_mask[:, None] & mask[None, :], other=0.0)
        total = tl.dot(block, weights, total, input_precision=PRECISION)
    if UP:
        total *= _scale_of(entry)
    places = output + (rows.to(tl.int64)[:, None] * stride + features[None, :])
    _add_to(places, row_mask[:, None] & mask[None, :], total)


@triton.jit(do_not_specialize=_VARIES, do_not_specialize_on_alignment=_VIEWS)
def outer_kernel(
    values, latent, entries, at, start, stop, slots, held, rank_blocks, columns, width, stride, latent_stride,
    UP: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of B (UP, from dy and latent) or of A: a program for a block of an expert's and task's."""
    block_number = tl.program_id(0) % (rank_blocks * columns)
    group = tl.program_id(0) // (rank_blocks * columns)
    first, end = tl.load(start + group), tl.load(stop + group)
    if first >= end:
        return
    entry, expert, rank = _entry_of(group, entries, at, slots, held)
    first_rank = block_number // columns * RANKS
    if first_rank >= rank:
        return
    ranks = first_rank + tl.arange(0, RANKS)
    features = block_number % columns * WIDTH + tl.arange(0, WIDTH)
    rank_mask, mask = ranks < rank, features < width
    total = tl.zeros((RANKS, WIDTH), dtype=tl.float32)
    for row in range(first, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        row_mask = rows < end
        pointer = latent + (rows.to(tl.int64)[:, None] * latent_stride + ranks[None, :])
        left = tl.load(pointer, mask=row_mask[:, None] & rank_mask[None, :], other=0.0)
        given = values + (rows.to(tl.int64)[:, None] * stride + features[None, :])
        right = tl.load(given, mask=row_mask[:, None] & mask[None, :], other=0.0)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    if UP:
        total *= _scale_of(entry)
    places = _places_of(
        entry, _UP_GRADIENT if UP else _DOWN_GRADIENT, tl.float32, expert, rank, ranks, features, width, UP
    )
    _add_to(places, rank_mask[:, None] & mask[None, :], total)
