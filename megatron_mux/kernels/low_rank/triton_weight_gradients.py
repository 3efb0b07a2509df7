"""Device code of `low_rank.triton`: gradients of A and B, of a bottleneck's biases, and of factors trained instead.

A program owns a block of one term's gradient and goes through all rows of the term's task, in the order of its own
tiles: nothing is added atomically, and a task's sums never depend on where its rows lie. Of a task with many rows it
goes through one part (`groups.PART_ROWS`), and another kernel adds the parts in their order.

Constants as in `low_rank.triton_device`. PART: rows of a part.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_mux.kernels.low_rank.triton_device import (
    _BY_MICRO_BATCH,
    _BY_TABLE,
    _COLUMN_COUNT,
    _DOWN_BIAS_GRADIENT,
    _DOWN_FACTORS_GRADIENT,
    _DOWN_GRADIENT,
    _KEEP_SCALE,
    _RANK,
    _SCALE,
    _THRESHOLD,
    _UP_BIAS_GRADIENT,
    _UP_FACTORS_GRADIENT,
    _UP_GRADIENT,
    _add_to,
    _integer,
    _latent_of,
    _multiple,
    _number,
    _pointer,
    _row_hash,
    _sum_rows,
    _term_of,
    _values_of,
    _weights_of,
)

_BY_PARTS = [*_BY_TABLE, "groups", "parts", "down_blocks"]


@triton.jit
def _outer_block(
    entry, values, stride, latent, latent_stride, first, stop, steps, sequence_ids, token_index,
    features, width, ranks, rank,
    UP: tl.constexpr, DROPOUT: tl.constexpr, FACTORS: tl.constexpr, OUTPUT_FACTORS: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`[WIDTH, RANKS]` fp32: values of the rows from `first` to `stop`, transposed, times `d * latent`."""
    total = tl.zeros((WIDTH, RANKS), dtype=tl.float32)
    for start in range(first, stop, ROWS):
        rows = start + tl.arange(0, ROWS)
        row_mask = rows < stop
        row_hash = rows
        if DROPOUT:
            row_hash = _row_hash(entry, rows, row_mask, steps, sequence_ids, token_index)
        block = _values_of(
            entry, values, stride, rows, row_mask, row_hash, features, width,
            UP, DROPOUT, OUTPUT_FACTORS, ALIGNED,
        )  # fmt: skip
        factors = _latent_of(entry, latent, latent_stride, rows, row_mask, ranks, rank, FACTORS, ALIGNED)
        total = tl.dot(tl.trans(block), factors, total, input_precision=PRECISION)
    if UP:
        total *= _number(entry, _SCALE)
    if DROPOUT:
        total *= _number(entry, _KEEP_SCALE)
    return total


@triton.jit
def _down_factors_gradient(
    entry, latent, d_latent, latent_stride, first, stop, ranks, rank,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Add the sum over rows of `d_latent * latent`."""
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for start in range(first, stop, ROWS):
        rows = start + tl.arange(0, ROWS)
        factors = _latent_of(entry, latent, latent_stride, rows, rows < stop, ranks, rank, None, ALIGNED)
        gradient = _latent_of(entry, d_latent, latent_stride, rows, rows < stop, ranks, rank, None, ALIGNED)
        total += factors.to(tl.float32) * gradient.to(tl.float32)
    _add_to(
        _pointer(entry, _DOWN_FACTORS_GRADIENT, tl.float32, False) + ranks, ranks < rank, _sum_rows(total)
    )


@triton.jit
def _up_factors_gradient(
    entry, values, stride, latent, latent_stride, first, stop, features, count, rank,
    FACTORS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the sum over rows of `scale * dy * ((d * latent) B^T)`: B times the gradient it would have without b."""
    total = tl.zeros((WIDTH, RANKS), dtype=tl.float32)
    for first_rank in range(0, rank, RANKS):
        ranks = first_rank + tl.arange(0, RANKS)
        block = _outer_block(
            entry, values, stride, latent, latent_stride, first, stop, first, entry, entry,
            features, count, ranks, rank, True, False, FACTORS, None, ALIGNED, PRECISION, ROWS, RANKS, WIDTH,
        )  # fmt: skip
        weights = _weights_of(entry, ranks, rank, features, count, values.dtype.element_ty, True, ALIGNED)
        total += block * tl.trans(weights).to(tl.float32)
    places = _pointer(entry, _UP_FACTORS_GRADIENT, tl.float32, False) + features
    _add_to(places, features < count, _sum_rows(tl.trans(total)))


@triton.jit
def _factors_gradient(
    entry, values, stride, latent, d_latent, latent_stride, first, stop, features, width, ranks, rank, first_rank,
    UP: tl.constexpr, FACTORS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of b (UP) or of d, by one program for each of its blocks, if the term trains them."""
    if UP:
        if first_rank == 0 and tl.load(entry + _UP_FACTORS_GRADIENT) != 0:
            _up_factors_gradient(
                entry, values, stride, latent, latent_stride, first, stop, features, width, rank,
                FACTORS, ALIGNED, PRECISION, ROWS, RANKS, WIDTH,
            )  # fmt: skip
    elif tl.program_id(1) == 0 and tl.load(entry + _DOWN_FACTORS_GRADIENT) != 0:
        _down_factors_gradient(
            entry, latent, d_latent, latent_stride, first, stop, ranks, rank, ALIGNED, ROWS, RANKS
        )


@triton.jit
def _bias_gradient(
    entry, values, stride, d_latent, latent_stride, first, stop, places, count,
    UP: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sum over rows of `scale * dy` (UP), or of `d_latent`, at BLOCK places of the bias."""
    sums = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(first, stop, ROWS):
        rows = start + tl.arange(0, ROWS)
        if UP:
            block = _values_of(
                entry, values, stride, rows, rows < stop, rows, places, count, True, False, None, ALIGNED
            )
        else:
            block = _latent_of(
                entry, d_latent, latent_stride, rows, rows < stop, places, count, None, ALIGNED
            )
        sums += block.to(tl.float32)
    total = _sum_rows(sums)
    if UP:
        total *= _number(entry, _SCALE)
        gradient = _pointer(entry, _UP_BIAS_GRADIENT, tl.float32, False)
    else:
        gradient = _pointer(entry, _DOWN_BIAS_GRADIENT, tl.float32, False)
    _add_to(gradient + places, places < count, total)


@triton.jit
def _part_of(row_ranges, groups, PART: tl.constexpr):
    """This program's group, and which part of whose rows it computes; negative: all of them.

    A part's number is its place in `product.partials_of`: a group's parts are counted from its first row's on, PART
    rows being one. No two are the same, since groups have no row in common.
    """
    low = tl.program_id(2)
    part = low - groups
    if part >= 0:
        low = part * 0
        high = groups
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(row_ranges + middle * 4 + 1) // PART <= part:
                low = middle
            else:
                high = middle
    return row_ranges + low * 4, part


@triton.jit
def _places_of_part(
    partials, part, number, width, features, first_rank, rank_blocks, RANKS: tl.constexpr
):  # fmt: skip
    """Where a part's block of a term's gradient lies, `[WIDTH, RANKS]`."""
    terms = tl.num_programs(0) // rank_blocks
    row = (part.to(tl.int64) * terms + number) * width + features
    return partials + (row[:, None] * (rank_blocks * RANKS) + (first_rank + tl.arange(0, RANKS))[None, :])


@triton.jit(do_not_specialize=_BY_PARTS, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def weight_gradient_kernel(
    entries, first_entry, slots, values, latent, d_latent, partials, row_ranges, sequence_ids, token_index,
    rank_blocks, groups, parts, stride, latent_stride, features_in, part_width,
    UP: tl.constexpr, DROPOUT: tl.constexpr, FACTORS: tl.constexpr, BIASED: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of B (UP, from dy and latent) or of A (from x and d_latent), or of a term's factors instead."""
    group, part = _part_of(row_ranges, groups, PART)
    first = tl.load(group + 1)
    stop = tl.load(group + 2)
    entry, exists = _term_of(entries, first_entry, slots, group, tl.program_id(0) // rank_blocks)
    if (not exists) | (first >= stop):
        return
    rank = _multiple(entry, _RANK, ALIGNED)
    first_rank = tl.program_id(0) % rank_blocks * RANKS
    width = features_in
    if UP:
        width = _multiple(entry, _COLUMN_COUNT, 8 if ALIGNED else 0)
    if (first_rank >= rank) | (tl.program_id(1) * WIDTH >= width):
        return
    ranks = first_rank + tl.arange(0, RANKS)
    features = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = (features < width)[:, None] & (ranks < rank)[None, :]
    if UP:
        gradient = _pointer(entry, _UP_GRADIENT, tl.float32, ALIGNED)
        factors = latent
    else:
        gradient = _pointer(entry, _DOWN_GRADIENT, tl.float32, ALIGNED)
        factors = d_latent
    count = (stop - first) // PART
    number = part - first // PART
    divided = (parts > 0) & (count >= 2) & (gradient.to(tl.int64) != 0)
    if (divided != (part >= 0)) | (divided & (number >= count)):
        return
    if divided:
        first += number * PART
        stop = tl.where(number == count - 1, stop, first + PART)
    if BIASED and (first_rank if UP else tl.program_id(1)) == 0:
        _bias_gradient(
            entry, values, stride, d_latent, latent_stride, first, stop,
            features if UP else ranks, width if UP else rank, UP, ALIGNED, ROWS, WIDTH if UP else RANKS,
        )  # fmt: skip
    if gradient.to(tl.int64) != 0:
        steps = tl.load(group + 3)
        if DROPOUT and _integer(entry, _THRESHOLD) > -32768:
            total = _outer_block(
                entry, values, stride, factors, latent_stride, first, stop, steps, sequence_ids, token_index, features,
                width, ranks, rank, UP, DROPOUT, FACTORS, FACTORS, ALIGNED, PRECISION, ROWS, RANKS, WIDTH,
            )  # fmt: skip
        else:
            total = _outer_block(
                entry, values, stride, factors, latent_stride, first, stop, steps, sequence_ids, token_index, features,
                width, ranks, rank, UP, False, FACTORS, FACTORS, ALIGNED, PRECISION, ROWS, RANKS, WIDTH,
            )  # fmt: skip
        if divided:
            places = _places_of_part(
                partials, part, tl.program_id(0) // rank_blocks, part_width, features, first_rank, rank_blocks, RANKS
            )  # fmt: skip
            tl.store(places, total, mask=mask)
        elif UP:
            _add_to(gradient + features[:, None] * rank + ranks[None, :], mask, total)
        else:
            _add_to(gradient + ranks[:, None] * width + features[None, :], tl.trans(mask), tl.trans(total))
    elif FACTORS is not None:
        _factors_gradient(
            entry, values, stride, latent, d_latent, latent_stride, first, stop, features, width, ranks, rank,
            first_rank, UP, FACTORS, ALIGNED, PRECISION, ROWS, RANKS, WIDTH,
        )  # fmt: skip


@triton.jit
def _add_parts(
    entry, group, partials, part_width, width, rank, rank_blocks, block,
    UP: tl.constexpr, ALIGNED: tl.constexpr, PART: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the parts of a block of one gradient, in their order."""
    gradient = _pointer(entry, _UP_GRADIENT if UP else _DOWN_GRADIENT, tl.float32, ALIGNED)
    first = tl.load(group + 1)
    parts = tl.where(gradient.to(tl.int64) != 0, (tl.load(group + 2) - first) // PART, 0)
    first_rank = tl.program_id(0) % rank_blocks * RANKS
    if (parts >= 2) & (first_rank < rank) & (block * WIDTH < width):
        ranks = first_rank + tl.arange(0, RANKS)
        features = block * WIDTH + tl.arange(0, WIDTH)
        mask = (features < width)[:, None] & (ranks < rank)[None, :]
        total = tl.zeros((WIDTH, RANKS), dtype=tl.float32)
        for i in range(parts):
            places = _places_of_part(
                partials, first // PART + i, tl.program_id(0) // rank_blocks, part_width, features, first_rank,
                rank_blocks, RANKS,
            )  # fmt: skip
            total += tl.load(places, mask=mask, other=0.0)
        if UP:
            _add_to(gradient + features[:, None] * rank + ranks[None, :], mask, total)
        else:
            _add_to(gradient + ranks[:, None] * width + features[None, :], tl.trans(mask), tl.trans(total))


@triton.jit(do_not_specialize=_BY_PARTS, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def add_parts_kernel(
    entries, first_entry, slots, partials, up_partials, row_ranges, rank_blocks, down_blocks, features_in, part_width,
    ALIGNED: tl.constexpr, PART: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What `weight_gradient_kernel` left of divided tasks: a program for a block of A's gradient, or of B's."""
    group = row_ranges + tl.program_id(2) * 4
    entry, exists = _term_of(entries, first_entry, slots, group, tl.program_id(0) // rank_blocks)
    if not exists:
        return
    rank = _multiple(entry, _RANK, ALIGNED)
    block = tl.program_id(1)
    if block < down_blocks:
        _add_parts(
            entry, group, partials, features_in, features_in, rank, rank_blocks, block,
            False, ALIGNED, PART, RANKS, WIDTH,
        )  # fmt: skip
    else:
        count = _multiple(entry, _COLUMN_COUNT, 8 if ALIGNED else 0)
        _add_parts(
            entry, group, up_partials, part_width, count, rank, rank_blocks, block - down_blocks,
            True, ALIGNED, PART, RANKS, WIDTH,
        )  # fmt: skip
