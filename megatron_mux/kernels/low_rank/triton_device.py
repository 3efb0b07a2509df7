"""Device code of `low_rank.triton`: three kernels forward and backward, and what they share.

A program owns a block of its output, so nothing is added atomically and results do not depend on the order in which
programs run. It reads rows of its own task only; entries of its block that lie outside the task's rows, the term's
rank or its columns are loaded as zeros and never stored.

Constants: ROWS rows, RANKS ranks and WIDTH features of a block. UP: the kernel computes with B and the output's
columns, otherwise with A and the input's features. DROPOUT: some term has it. FACTORS: dtype of d and b, None if no
term has them. BIASED: the terms are bottlenecks. ALIGNED: `terms.TermTable.alignment`. PRECISION: of fp32 products.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from megatron_mux.kernels.low_rank.terms import ENTRY

_FIELDS = tl.constexpr(len(ENTRY))
(
    _DOWN, _UP, _DOWN_GRADIENT, _UP_GRADIENT, _DOWN_FACTORS, _UP_FACTORS, _DOWN_FACTORS_GRADIENT,
    _UP_FACTORS_GRADIENT, _COLUMNS, _COLUMN_COUNT, _RANK, _LATENT, _FIRST_FEATURE, _KEY_LOW, _KEY_HIGH, _THRESHOLD,
    _SCALE, _KEEP_SCALE, _DOWN_BIAS, _UP_BIAS, _DOWN_BIAS_GRADIENT, _UP_BIAS_GRADIENT, _ACTIVATION,
    _SHARING,
) = map(tl.constexpr, range(len(ENTRY)))  # fmt: skip

_BY_TABLE = ["slots", "rank_blocks"]
_BY_MICRO_BATCH = ["entries", "first_entry", "tiles", "row_ranges", "sequence_ids", "token_index"]
"""Arguments that change as tasks come and go, and views whose alignment differs between micro-batches: kernels
specialised on them would be compiled anew within a run.
"""


@triton.jit
def _integer(entry, field: tl.constexpr):
    return tl.load(entry + field).to(tl.int32)


@triton.jit
def _number(entry, field: tl.constexpr):
    return tl.load(entry + field).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _pointer(entry, field: tl.constexpr, element: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(entry + field).to(tl.pointer_type(element))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _multiple(entry, field: tl.constexpr, OF: tl.constexpr):
    """An integer that is known to be a multiple of OF, unless that is 0."""
    value = tl.load(entry + field).to(tl.int32)
    if OF:
        # The compiler loses such a hint on an argument of a function: it has to be given beside the load.
        value = tl.multiple_of(value, OF)
    return value


@triton.jit
def _terms_of(slot, first_entry, slots):
    """The first of a slot's entries, and one past the last; none if the slot has no term at this BaseOp."""
    known = slot < slots
    first = tl.load(first_entry + slot, mask=known, other=0)
    last = tl.load(first_entry + slot + 1, mask=known, other=0)
    return first, last


@triton.jit
def _term_of(entries, first_entry, slots, group, number):
    """The entry of a task's term of this number, and whether the task of `group` has that many at this BaseOp."""
    at, end = _terms_of(tl.load(group), first_entry, slots)
    at += number
    return entries + at * _FIELDS, at < end


@triton.jit
def _rows_of(tile, ROWS: tl.constexpr):
    """The rows of a tile, and which of ROWS there are."""
    rows = tl.load(tile + 1) + tl.arange(0, ROWS)
    return rows, rows < tl.load(tile + 2)


@triton.jit
def _places_of(values, stride, entry, rows, features, count, UP: tl.constexpr, ALIGNED: tl.constexpr):
    """Where rows x features lie in `values`: a term's output columns may be listed."""
    columns = features
    if UP:
        address = tl.load(entry + _COLUMNS)
        mask = features < tl.where(address != 0, count, 0)
        listed = tl.load(address.to(tl.pointer_type(tl.int32)) + features, mask=mask, other=0)
        columns = tl.where(address != 0, listed, features)
    places = values + (rows.to(tl.int64)[:, None] * stride + columns[None, :])
    if UP and ALIGNED:
        places = tl.max_contiguous(tl.multiple_of(places, [16, 16]), [1, 8])
    return places


@triton.jit
def _factors_of(entry, field: tl.constexpr, places, count, FACTORS: tl.constexpr):
    """Factors d or b at `places`, ones if the term has none, fp32."""
    address = tl.load(entry + field)
    mask = places < tl.where(address != 0, count, 0)
    return tl.load(address.to(tl.pointer_type(FACTORS)) + places, mask=mask, other=1.0).to(tl.float32)


@triton.jit
def _weights_of(
    entry, ranks, rank, features, width, element: tl.constexpr, UP: tl.constexpr, ALIGNED: tl.constexpr
):
    """A block of A, or of B transposed: `[RANKS, WIDTH]`."""
    rank_mask = ranks < rank
    mask = features < width
    if UP:
        pointer = _pointer(entry, _UP, element, ALIGNED)
        block = tl.load(
            pointer + features[:, None] * rank + ranks[None, :],
            mask=mask[:, None] & rank_mask[None, :],
            other=0.0,
        )
        weights = tl.trans(block)
    else:
        pointer = _pointer(entry, _DOWN, element, ALIGNED)
        weights = tl.load(
            pointer + ranks[:, None] * width + features[None, :],
            mask=rank_mask[:, None] & mask[None, :],
            other=0.0,
        )
    return weights


@triton.jit
def _mix(x):
    """`dropout._mix_`, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _row_hash(entry, rows, mask, steps, sequence_ids, token_index):
    """The share of rows in the hash of `dropout.keep_mask`."""
    low = _integer(entry, _KEY_LOW).to(tl.uint32, bitcast=True)
    high = _integer(entry, _KEY_HIGH).to(tl.uint32, bitcast=True)
    sequences = tl.load(sequence_ids + rows, mask=mask, other=0).to(tl.uint32, bitcast=True)
    tokens = tl.load(token_index + rows, mask=mask, other=0).to(tl.uint32, bitcast=True)
    row = sequences ^ _mix(steps.to(tl.uint32, bitcast=True) ^ low)
    return _mix((_mix(_mix(row) + tokens)) ^ high)


@triton.jit
def _kept(entry, row_hash, features, ALIGNED: tl.constexpr):
    """Which entries of rows x features dropout keeps: `dropout.keep_mask`, bit for bit."""
    low = _integer(entry, _KEY_LOW).to(tl.uint32, bitcast=True)
    threshold = _integer(entry, _THRESHOLD)
    places = _integer(entry, _FIRST_FEATURE) + features
    if ALIGNED:
        # Features come in pairs, which share a hash: the odd one has the upper half of its bits.
        PAIRS: tl.constexpr = features.shape[0] // 2
        places, _ = tl.split(tl.reshape(places, (PAIRS, 2)))
    column = _mix((places >> 1).to(tl.uint32, bitcast=True) ^ low)
    bits = _mix(row_hash[:, None] ^ column[None, :]).to(tl.int32, bitcast=True)
    if ALIGNED:
        kept = tl.interleave(((bits << 16) >> 16) >= threshold, (bits >> 16) >= threshold)
    else:
        kept = ((bits << ((places & 1) ^ 1)[None, :] * 16) >> 16) >= threshold
    return kept


@triton.jit
def _latent_of(
    entry, latent, latent_stride, rows, row_mask, ranks, rank,
    FACTORS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of `d * latent`, `[ROWS, RANKS]`."""
    rank_mask = ranks < rank
    at = _multiple(entry, _LATENT, ALIGNED)
    places = rows.to(tl.int64)[:, None] * latent_stride + (at + ranks)[None, :]
    block = tl.load(latent + places, mask=row_mask[:, None] & rank_mask[None, :], other=0.0)
    if FACTORS is not None:
        factors = _factors_of(entry, _DOWN_FACTORS, ranks, rank, FACTORS)
        block = (block * factors[None, :]).to(latent.dtype.element_ty)
    return block


@triton.jit
def _values_of(
    entry, values, stride, rows, row_mask, row_hash, features, width,
    UP: tl.constexpr, DROPOUT: tl.constexpr, FACTORS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of the kept entries of x, not yet scaled, or of `b * dy`: `[ROWS, WIDTH]`."""
    mask = features < width
    places = _places_of(values, stride, entry, rows, features, width, UP, ALIGNED)
    block = tl.load(places, mask=row_mask[:, None] & mask[None, :], other=0.0)
    if DROPOUT:
        block = tl.where(_kept(entry, row_hash, features, ALIGNED), block, 0.0)
    if FACTORS is not None and UP:
        factors = _factors_of(entry, _UP_FACTORS, features, width, FACTORS)
        block = (block * factors[None, :]).to(values.dtype.element_ty)
    return block


@triton.jit
def _reduce_tile(
    entry, values, stride, rows, row_mask, steps, sequence_ids, token_index, ranks, rank, width,
    UP: tl.constexpr, DROPOUT: tl.constexpr, FACTORS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`[ROWS, RANKS]` fp32: the values of rows times A or B."""
    row_hash = rows
    if DROPOUT:
        row_hash = _row_hash(entry, rows, row_mask, steps, sequence_ids, token_index)
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for start in range(0, width, WIDTH):
        features = start + tl.arange(0, WIDTH)
        block = _values_of(
            entry, values, stride, rows, row_mask, row_hash, features, width,
            UP, DROPOUT, FACTORS, ALIGNED,
        )  # fmt: skip
        weights = _weights_of(entry, ranks, rank, features, width, values.dtype.element_ty, UP, ALIGNED)
        total = tl.dot(block, tl.trans(weights), total, input_precision=PRECISION)
    if UP:
        total *= _number(entry, _SCALE)
    if DROPOUT:
        total *= _number(entry, _KEEP_SCALE)
    return total


@triton.jit(do_not_specialize=_BY_TABLE, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def reduce_kernel(
    entries, first_entry, slots, values, latent, tiles, row_ranges, sequence_ids, token_index,
    rank_blocks, stride, latent_stride, features_in,
    UP: tl.constexpr, DROPOUT: tl.constexpr, FACTORS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Values to latent columns: a program for a rank block of a term and ROWS rows of a tile of TILE."""
    place = tl.program_id(1)
    tile = tiles + place // (TILE // ROWS) * 3
    first = tl.load(tile + 1) + place % (TILE // ROWS) * ROWS
    stop = tl.load(tile + 2)
    group = row_ranges + tl.load(tile) * 4
    entry, exists = _term_of(entries, first_entry, slots, group, tl.program_id(0) // rank_blocks)
    if (not exists) | (first >= stop):
        return
    rank = _multiple(entry, _RANK, ALIGNED)
    first_rank = tl.program_id(0) % rank_blocks * RANKS
    if first_rank >= rank:
        return
    ranks = first_rank + tl.arange(0, RANKS)
    rows = first + tl.arange(0, ROWS)
    row_mask = rows < stop
    steps = tl.load(group + 3)
    width = features_in
    if UP:
        width = _multiple(entry, _COLUMN_COUNT, 8 if ALIGNED else 0)
    # A term without dropout takes the loop without hashes, whatever its neighbours do.
    dropped = DROPOUT and _integer(entry, _THRESHOLD) > -32768
    if dropped:
        total = _reduce_tile(
            entry, values, stride, rows, row_mask, steps, sequence_ids, token_index, ranks, rank, width,
            UP, DROPOUT, FACTORS, ALIGNED, ROWS, RANKS, WIDTH, PRECISION,
        )  # fmt: skip
    else:
        total = _reduce_tile(
            entry, values, stride, rows, row_mask, steps, sequence_ids, token_index, ranks, rank, width,
            UP, False, FACTORS, ALIGNED, ROWS, RANKS, WIDTH, PRECISION,
        )  # fmt: skip
    places = (
        rows.to(tl.int64)[:, None] * latent_stride + (_multiple(entry, _LATENT, ALIGNED) + ranks)[None, :]
    )
    tl.store(
        latent + places, total.to(latent.dtype.element_ty), mask=row_mask[:, None] & (ranks < rank)[None, :]
    )


@triton.jit
def _expand_tile(
    entry, latent, latent_stride, rows, row_mask, features, width,
    UP: tl.constexpr, FACTORS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`[ROWS, WIDTH]` fp32: `d * latent` of rows times A, or times B transposed."""
    rank = _multiple(entry, _RANK, ALIGNED)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for first_rank in range(0, rank, RANKS):
        ranks = first_rank + tl.arange(0, RANKS)
        block = _latent_of(entry, latent, latent_stride, rows, row_mask, ranks, rank, FACTORS, ALIGNED)
        weights = _weights_of(entry, ranks, rank, features, width, latent.dtype.element_ty, UP, ALIGNED)
        total = tl.dot(block, weights, total, input_precision=PRECISION)
    return total


@triton.jit
def _sum_rows(values):
    """The sum of `[ROWS, N]` over its rows, at most 128: halves onto halves, so that layouts do not change its bits.

    Only values that are stored or carried through a loop come here: a product that ends in a sum may become one
    instruction, or not, by layout.
    """
    ROWS: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    for i in tl.static_range(1, 8):
        if ROWS >> i > 0:
            values = tl.sum(tl.reshape(values, (2, ROWS >> i, N)), axis=0)
    return tl.reshape(values, (N,))


@triton.jit
def _add_to(places, mask, total):
    block = tl.load(places, mask=mask, other=0.0)
    tl.store(places, (block.to(tl.float32) + total).to(block.dtype), mask=mask)


@triton.jit(do_not_specialize=_BY_TABLE, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def up_kernel(
    entries, first_entry, slots, output, latent, tiles, row_ranges, stride, latent_stride,
    FACTORS: tl.constexpr, BIASED: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Latent columns to output columns: a program for a tile, a column block and all terms on the same columns."""
    tile = tiles + tl.program_id(0) * 3
    entry, exists = _term_of(entries, first_entry, slots, row_ranges + tl.load(tile) * 4, tl.program_id(2))
    if not exists:
        return
    count = _multiple(entry, _COLUMN_COUNT, 8 if ALIGNED else 0)
    sharing = _integer(entry, _SHARING)
    if (sharing == 0) | (tl.program_id(1) * WIDTH >= count):
        return
    features = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = features < count
    rows, row_mask = _rows_of(tile, ROWS)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for i in range(sharing):
        term = entry + i * _FIELDS
        out = _expand_tile(
            term, latent, latent_stride, rows, row_mask, features, count,
            True, FACTORS, ALIGNED, ROWS, RANKS, WIDTH, PRECISION,
        )  # fmt: skip
        if BIASED:
            bias = _pointer(term, _UP_BIAS, latent.dtype.element_ty, ALIGNED)
            out += tl.load(bias + features, mask=mask, other=0.0).to(tl.float32)[None, :]
        out *= _number(term, _SCALE)
        if FACTORS is not None:
            out *= _factors_of(term, _UP_FACTORS, features, count, FACTORS)[None, :]
        total += out
    places = _places_of(output, stride, entry, rows, features, count, True, ALIGNED)
    _add_to(places, row_mask[:, None] & mask[None, :], total)


@triton.jit(do_not_specialize=_BY_TABLE, do_not_specialize_on_alignment=_BY_MICRO_BATCH)
def input_gradient_kernel(
    entries, first_entry, slots, gradient, d_latent, tiles, row_ranges, sequence_ids, token_index,
    stride, latent_stride, width,
    DROPOUT: tl.constexpr, FACTORS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of latent columns to those of the input: a program for a tile and a feature block, over all terms."""
    tile = tiles + tl.program_id(0) * 3
    group = row_ranges + tl.load(tile) * 4
    at, end = _terms_of(tl.load(group), first_entry, slots)
    if at >= end:
        return
    features = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    rows, row_mask = _rows_of(tile, ROWS)
    steps = tl.load(group + 3)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for i in range(at, end):
        entry = entries + i * _FIELDS
        out = _expand_tile(
            entry, d_latent, latent_stride, rows, row_mask, features, width,
            False, FACTORS, ALIGNED, ROWS, RANKS, WIDTH, PRECISION,
        )  # fmt: skip
        if DROPOUT and _integer(entry, _THRESHOLD) > -32768:
            row_hash = _row_hash(entry, rows, row_mask, steps, sequence_ids, token_index)
            out = tl.where(_kept(entry, row_hash, features, ALIGNED), out * _number(entry, _KEEP_SCALE), 0.0)
        total += out
    places = _places_of(gradient, stride, entries, rows, features, width, False, ALIGNED)
    _add_to(places, row_mask[:, None] & (features < width)[None, :], total)
