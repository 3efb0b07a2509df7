"""Queries, keys and values out of the product of a fused projection, normalised and rotated, by one Triton kernel.

A program computes some heads of one row. See `pointwise.functions.turn`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.pointwise.arguments import Heads
from megatron_mux.kernels.triton_launch import cdiv, launch, next_power_of_2

ELEMENTS = 4096
"""Features of all heads of a program; half as many where heads are normalised, which takes more registers."""
WARPS = 4


def turn(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mixed: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
) -> None:
    """Write `[T, h, D]`, `[T, g, D]` and `[T, g, D]`, contiguous, of `mixed` `[T, (h + 2 g), D]`."""
    grid, constants = _geometry(mixed, cos, heads)
    if query.numel():
        arguments = (
            query, key, value, mixed, cos, sin, *heads.weights, *mixed.stride()[:2], cos.stride(0), heads.eps,
        )  # fmt: skip
        launch(_turn, grid, arguments, constants)


def turn_backward(
    d_mixed: Tensor,
    d_query: Tensor,
    d_key: Tensor | None,
    d_value: Tensor | None,
    mixed: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: Heads,
) -> None:
    """Write the gradient of `mixed`, contiguous; the values of `mixed` are needed for norms only."""
    grid, constants = _geometry(d_mixed, cos, heads)
    if not d_mixed.numel():
        return
    d_key, d_value = (d_query if g is None else g for g in (d_key, d_value))
    arguments = (
        d_mixed, d_query, d_key, d_value, mixed, cos, sin, *heads.weights, *d_query.stride()[:2],
        *d_key.stride()[:2], *d_value.stride()[:2], *((0, 0) if mixed is None else mixed.stride()[:2]),
        cos.stride(0), heads.eps,
    )  # fmt: skip
    launch(_turn_backward, grid, arguments, constants)


def _geometry(mixed: Tensor, cos: Tensor, heads: Heads) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid of a launch, and the constants of its kernel."""
    rows, count, size = mixed.shape
    half = cos.shape[-1]
    rest = size - 2 * half
    normed = heads.weights[0] is not None
    elements = ELEMENTS // 2 if normed else ELEMENTS
    block = max(1, min(next_power_of_2(count), elements // next_power_of_2(size)))
    constants = {
        "QUERIES": heads.queries, "COUNT": count, "PER_GROUP": heads.queries + 2 * heads.keyed, "KEYED": heads.keyed,
        "SIZE": size, "HALF": half, "FIRST": heads.first, "INTERLEAVED": heads.interleaved,
        "NORMED": normed, "HEADS": block, "HALVES": next_power_of_2(half),
        "REST": rest, "RESTS": next_power_of_2(max(rest, 1)), "num_warps": WARPS,
    }  # fmt: skip
    return (rows, cdiv(count, block)), constants


@triton.jit
def _places(
    QUERIES: tl.constexpr, COUNT: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Of a program's heads, each `[HEADS, 1]`: the head, its group, its place in the group, and whether it exists."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    return head, head // PER_GROUP, head % PER_GROUP, head < COUNT


@triton.jit
def _features(
    HALF: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, HALVES: tl.constexpr, RESTS: tl.constexpr
):  # fmt: skip
    """Where the two features of each rotated pair are, and all features that stay."""
    pair = tl.arange(0, HALVES)[None, :]
    if INTERLEAVED:
        first = FIRST + 2 * pair
        other = first + 1
    else:
        first = FIRST + pair
        other = first + HALF
    rest = tl.arange(0, RESTS)[None, :]
    return pair, first, other, tl.where(rest < FIRST, rest, rest + 2 * HALF)


@triton.jit
def _weight(query_weight, key_weight, at, mask, is_key):
    """`[HEADS, n]`: the weights of queries' or keys' norm."""
    of_queries = tl.load(query_weight + at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_key, tl.load(key_weight + at, mask=mask, other=0.0).to(tl.float32), of_queries)


@triton.jit
def _store(query, key, value, place_of_query, place_of_key, at, x, mask, slot, QUERIES: tl.constexpr, KEYED: tl.constexpr):  # fmt: skip  # noqa: E501
    tl.store(query + place_of_query + at, x, mask=mask & (slot < QUERIES))
    if KEYED:
        tl.store(key + place_of_key + at, x, mask=mask & (slot == QUERIES))
        tl.store(value + place_of_key + at, x, mask=mask & (slot > QUERIES))


@triton.jit
def _load(
    query, key, value, of_query, of_key, of_value, at, mask, slot, QUERIES: tl.constexpr, KEYED: tl.constexpr
):
    x = tl.load(query + of_query + at, mask=mask & (slot < QUERIES), other=0.0)
    if KEYED:
        of_keys = tl.load(key + of_key + at, mask=mask & (slot == QUERIES), other=0.0)
        of_values = tl.load(value + of_value + at, mask=mask & (slot > QUERIES), other=0.0)
        x = tl.where(slot < QUERIES, x, tl.where(slot == QUERIES, of_keys, of_values))
    return x.to(tl.float32)


@triton.jit
def _turn(
    query, key, value, mixed, cos, sin, query_weight, key_weight, row_stride, head_stride, angle_stride, epsilon,
    QUERIES: tl.constexpr, COUNT: tl.constexpr, PER_GROUP: tl.constexpr, KEYED: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr,
    HALVES: tl.constexpr, REST: tl.constexpr, RESTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, group, slot, there = _places(QUERIES, COUNT, PER_GROUP, HEADS)
    pair, first, other, rest = _features(HALF, FIRST, INTERLEAVED, HALVES, RESTS)
    in_half = pair < HALF
    in_rest = tl.arange(0, RESTS)[None, :] < REST
    source = mixed + row * row_stride + head * head_stride
    x = tl.load(source + first, mask=there & in_half, other=0.0).to(tl.float32)
    y = tl.load(source + other, mask=there & in_half, other=0.0).to(tl.float32)
    kind = query.dtype.element_ty
    turned = slot <= QUERIES
    if REST:
        z = tl.load(source + rest, mask=there & in_rest, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        if REST:
            squares += tl.sum(z * z, axis=1)
        scale = (1.0 / tl.sqrt(squares / SIZE + epsilon))[:, None]
        is_key = slot == QUERIES
        x = tl.where(turned, (x * scale * _weight(query_weight, key_weight, first, in_half, is_key)), x)
        y = tl.where(turned, (y * scale * _weight(query_weight, key_weight, other, in_half, is_key)), y)
        x = x.to(kind).to(tl.float32)
        y = y.to(kind).to(tl.float32)
        if REST:
            z = tl.where(turned, z * scale * _weight(query_weight, key_weight, rest, in_rest, is_key), z)
    c = tl.load(cos + row * angle_stride + pair, mask=in_half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_stride + pair, mask=in_half, other=0.0).to(tl.float32)
    place_of_query = (row * (COUNT // PER_GROUP * QUERIES) + group * QUERIES + slot) * SIZE
    place_of_key = (row * (COUNT // PER_GROUP) + group) * SIZE
    new_x = tl.where(turned, x * c - y * s, x).to(kind)
    new_y = tl.where(turned, y * c + x * s, y).to(kind)
    mask = there & in_half
    _store(query, key, value, place_of_query, place_of_key, FIRST + pair, new_x, mask, slot, QUERIES, KEYED)
    _store(
        query,
        key,
        value,
        place_of_query,
        place_of_key,
        FIRST + HALF + pair,
        new_y,
        mask,
        slot,
        QUERIES,
        KEYED,
    )
    if REST:
        mask = there & in_rest
        _store(query, key, value, place_of_query, place_of_key, rest, z.to(kind), mask, slot, QUERIES, KEYED)


@triton.jit
def _turn_backward(
    d_mixed, query, key, value, mixed, cos, sin, query_weight, key_weight, query_stride, query_head, key_stride,
    key_head, value_stride, value_head, row_stride, head_stride, angle_stride, epsilon,
    QUERIES: tl.constexpr, COUNT: tl.constexpr, PER_GROUP: tl.constexpr, KEYED: tl.constexpr, SIZE: tl.constexpr,
    HALF: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, HEADS: tl.constexpr,
    HALVES: tl.constexpr, REST: tl.constexpr, RESTS: tl.constexpr,
):  # fmt: skip
    """`query`, `key` and `value` are the gradients of those."""
    row = tl.program_id(0).to(tl.int64)
    head, group, slot, there = _places(QUERIES, COUNT, PER_GROUP, HEADS)
    pair, first, other, rest = _features(HALF, FIRST, INTERLEAVED, HALVES, RESTS)
    in_half = pair < HALF
    in_rest = tl.arange(0, RESTS)[None, :] < REST
    of_query = row * query_stride + (group * QUERIES + slot) * query_head
    of_key = row * key_stride + group * key_head
    of_value = row * value_stride + group * value_head
    mask = there & in_half
    a = _load(query, key, value, of_query, of_key, of_value, FIRST + pair, mask, slot, QUERIES, KEYED)
    b = _load(query, key, value, of_query, of_key, of_value, FIRST + HALF + pair, mask, slot, QUERIES, KEYED)
    if REST:
        d = _load(query, key, value, of_query, of_key, of_value, rest, there & in_rest, slot, QUERIES, KEYED)
    c = tl.load(cos + row * angle_stride + pair, mask=in_half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * angle_stride + pair, mask=in_half, other=0.0).to(tl.float32)
    turned = slot <= QUERIES
    # The inverse of a rotation is its transpose: the same, backwards.
    new_a = tl.where(turned, a * c + b * s, a)
    new_b = tl.where(turned, b * c - a * s, b)
    if NORMED:
        source = mixed + row * row_stride + head * head_stride
        x = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(source + other, mask=mask, other=0.0).to(tl.float32)
        is_key = slot == QUERIES
        back_a = new_a * _weight(query_weight, key_weight, first, in_half, is_key)
        back_b = new_b * _weight(query_weight, key_weight, other, in_half, is_key)
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        along = tl.sum(back_a * x, axis=1) + tl.sum(back_b * y, axis=1)
        if REST:
            z = tl.load(source + rest, mask=there & in_rest, other=0.0).to(tl.float32)
            back_d = d * _weight(query_weight, key_weight, rest, in_rest, is_key)
            squares += tl.sum(z * z, axis=1)
            along += tl.sum(back_d * z, axis=1)
        scale = (1.0 / tl.sqrt(squares / SIZE + epsilon))[:, None]
        along = along[:, None] / SIZE * scale * scale
        new_a = tl.where(turned, scale * (back_a - x * along), new_a)
        new_b = tl.where(turned, scale * (back_b - y * along), new_b)
        if REST:
            d = tl.where(turned, scale * (back_d - z * along), d)
    kind = d_mixed.dtype.element_ty
    target = d_mixed + (row * COUNT + head) * SIZE
    tl.store(target + first, new_a.to(kind), mask=mask)
    tl.store(target + other, new_b.to(kind), mask=mask)
    if REST:
        tl.store(target + rest, d.to(kind), mask=there & in_rest)
