"""Activations, norms and residual sums between frozen products by Triton kernels: one launch for each, either way.

A program computes one row, or a part of it: no row ever meets another, and a row's bits do not depend on the number of
rows. All is computed in fp32 and rounded where torch's modules round.

Where no GPU is at hand the kernels run in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_mux.kernels.pointwise.arguments import JoinedNorms, Norm
from megatron_mux.kernels.pointwise.triton_rotary import turn, turn_backward
from megatron_mux.kernels.triton_launch import cdiv, launch, next_power_of_2

__all__ = ["activate", "activate_backward", "join", "join_backward", "turn", "turn_backward"]

BLOCK = 2048
"""Inner features of a program of `activate`."""
ACTIVATION_WARPS = 4
_KINDS = {
    "silu": 0,
    "swish": 0,
    "gelu": 1,
    "gelu_new": 2,
    "gelu_pytorch_tanh": 2,
    "gelu_fast": 2,
    "quick_gelu": 3,
    "relu": 4,
}


def norm_warps(width: int) -> int:
    """Warps of a program that normalises a row: 16 values a thread, so that registers suffice for a backward pass."""
    return int(min(32, max(1, next_power_of_2(width) // 512)))


def activate(out: Tensor, x: Tensor, bias: Tensor | None, activation: str, gated: bool) -> None:
    """Write `activation(x + bias)` to `[T, F]`; gated, `x` is `[T, 2 F]`: see `pointwise.functions.activate`."""
    rows, width = out.shape
    if out.numel():
        constants = _of_activation(bias, activation, gated)
        launch(_activate, (rows, cdiv(width, BLOCK)), (out, x, bias, width, x.stride(0)), constants)


def activate_backward(
    d_x: Tensor, gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str, gated: bool
) -> None:
    """Write the gradient of `activate`'s input, contiguous."""
    rows, width = gradient.shape
    if gradient.numel():
        constants = _of_activation(bias, activation, gated)
        arguments = d_x, gradient, x, bias, width, gradient.stride(0), x.stride(0)
        launch(_activate_backward, (rows, cdiv(width, BLOCK)), arguments, constants)


def _of_activation(bias: Tensor | None, activation: str, gated: bool) -> dict[str, Any]:
    return {
        "KIND": _KINDS[activation], "GATED": gated, "BIASED": bias is not None, "BLOCK": BLOCK,
        "num_warps": ACTIVATION_WARPS,
    }  # fmt: skip


def join(
    total: Tensor | None,
    normed: Tensor | None,
    output: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norms: JoinedNorms,
) -> None:
    """Write the sum `[T, H]` and its norm: see `pointwise.functions.join`."""
    inner, outer = norms
    rows, width = output.shape
    if not output.numel():
        return
    some = inner or outer
    arguments = (
        total, normed, output, bias, residual,
        *_parameters(inner), *_parameters(outer),
        width, output.stride(0), 0 if residual is None else residual.stride(0), some.eps if some else 0.0,
    )  # fmt: skip
    constants = {
        "BIASED": bias is not None, "ADDED": residual is not None, "STORED": total is not None,
        "INNER": inner is not None, "OUTER": outer is not None, "CENTRED": bool(some and some.centred),
        "SHIFTED": bool(some and some.bias is not None), "BLOCK": next_power_of_2(width),
        "num_warps": norm_warps(width),
    }  # fmt: skip
    launch(_join, (rows,), arguments, constants)


def join_backward(
    d_total: Tensor,
    d_output: Tensor | None,
    gradient: Tensor | None,
    d_normed: Tensor | None,
    total: Tensor,
    output: Tensor | None,
    bias: Tensor | None,
    norms: JoinedNorms,
) -> None:
    """Write the gradients of the sum and, if that is normalised first, of what `join` is given to add."""
    inner, outer = norms
    rows, width = total.shape
    if not total.numel():
        return
    some = inner or outer
    arguments = (
        d_total, d_output, gradient, d_normed, total, output, bias,
        _parameters(inner)[0], _parameters(outer)[0], width,
        0 if gradient is None else gradient.stride(0), 0 if d_normed is None else d_normed.stride(0),
        total.stride(0), 0 if output is None else output.stride(0), some.eps if some else 0.0,
    )  # fmt: skip
    constants = {
        "BIASED": bias is not None, "ADDED": gradient is not None,
        "INNER": inner is not None, "OUTER": d_normed is not None, "CENTRED": bool(some and some.centred),
        "BLOCK": next_power_of_2(width), "num_warps": norm_warps(width),
    }  # fmt: skip
    launch(_join_backward, (rows,), arguments, constants)


def _parameters(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """The activation of fp32 values, and its derivative; what is not used is not computed."""
    if KIND == 0:
        share = 1.0 / (1.0 + tl.exp(-x))
        return x * share, share * (1.0 + x * (1.0 - share))
    elif KIND == 1:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 2:
        # 0.5 (1 + tanh(u)) is the sigmoid of 2 u.
        share = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        return x * share, share + x * share * (1.0 - share) * slope
    elif KIND == 3:
        share = 1.0 / (1.0 + tl.exp(-1.702 * x))
        return x * share, share + 1.702 * x * share * (1.0 - share)
    else:
        # NaN stays NaN, as in torch.
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0)


@triton.jit
def _half(x, bias, at, mask, BIASED: tl.constexpr):
    """Some features of a row with their bias, rounded as a sum of its own would be."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if BIASED:
        value = (value.to(tl.float32) + tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)).to(
            value.dtype
        )
    return value.to(tl.float32)


@triton.jit
def _activate(
    out, x, bias, width, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x += row * x_stride
    value, _ = _activated(_half(x, bias, at, mask, BIASED), KIND)
    if GATED:
        value = value.to(out.dtype.element_ty).to(tl.float32) * _half(x, bias, width + at, mask, BIASED)
    tl.store(out + row * width + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward(
    d_x, gradient, x, bias, width, gradient_stride, x_stride,
    KIND: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    x += row * x_stride
    d_out = tl.load(gradient + row * gradient_stride + at, mask=mask, other=0.0).to(tl.float32)
    value, slope = _activated(_half(x, bias, at, mask, BIASED), KIND)
    kind = d_x.dtype.element_ty
    if GATED:
        d_x += row * 2 * width
        up = _half(x, bias, width + at, mask, BIASED)
        tl.store(d_x + width + at, (d_out * value.to(kind).to(tl.float32)).to(kind), mask=mask)
        d_out *= up
    else:
        d_x += row * width
    if KIND == 4:
        d_in = tl.where(slope == 0, 0.0, d_out)  # selected: infinity times zero is no gradient
    else:
        d_in = d_out * slope
    tl.store(d_x + at, d_in.to(kind), mask=mask)


@triton.jit
def _centred(value, mask, width, epsilon, CENTRED: tl.constexpr):
    """A row, less its mean for a LayerNorm, and the reciprocal of its root mean square."""
    if CENTRED:
        value = tl.where(mask, value - tl.sum(value) / width, 0.0)
    return value, 1.0 / tl.sqrt(tl.sum(value * value) / width + epsilon)


@triton.jit
def _norm(value, weight, shift, at, mask, width, epsilon, CENTRED: tl.constexpr, SHIFTED: tl.constexpr):
    value, scale = _centred(value, mask, width, epsilon, CENTRED)
    value = value * scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if SHIFTED:
        value += tl.load(shift + at, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def _norm_backward(gradient, value, weight, at, mask, width, epsilon, CENTRED: tl.constexpr):
    """The gradient of a norm's input; its statistics are computed again, which reads nothing besides."""
    value, scale = _centred(value, mask, width, epsilon, CENTRED)
    back = gradient * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    along = tl.sum(back * value) / width * scale * scale
    mean = tl.sum(back) / width if CENTRED else 0.0
    return scale * (back - (value * along + mean))


@triton.jit
def _join(
    total, normed, output, bias, residual, inner_weight, inner_shift, outer_weight, outer_shift,
    width, output_stride, residual_stride, epsilon,
    BIASED: tl.constexpr, ADDED: tl.constexpr, STORED: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    CENTRED: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    value = _half(output + row * output_stride, bias, at, mask, BIASED)
    kind = output.dtype.element_ty
    if INNER:
        value = _norm(value, inner_weight, inner_shift, at, mask, width, epsilon, CENTRED, SHIFTED)
        value = value.to(kind).to(tl.float32)
    if ADDED:
        value += tl.load(residual + row * residual_stride + at, mask=mask, other=0.0).to(tl.float32)
        value = value.to(kind).to(tl.float32)
    if STORED:
        tl.store(total + row * width + at, value.to(kind), mask=mask)
    if OUTER:
        value = _norm(value, outer_weight, outer_shift, at, mask, width, epsilon, CENTRED, SHIFTED)
        tl.store(normed + row * width + at, value.to(kind), mask=mask)


@triton.jit
def _join_backward(
    d_total, d_output, gradient, d_normed, total, output, bias, inner_weight, outer_weight, width,
    gradient_stride, normed_stride, total_stride, output_stride, epsilon,
    BIASED: tl.constexpr, ADDED: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    kind = d_total.dtype.element_ty
    back = tl.zeros((BLOCK,), dtype=tl.float32)
    if OUTER:
        value = tl.load(total + row * total_stride + at, mask=mask, other=0.0).to(tl.float32)
        d_out = tl.load(d_normed + row * normed_stride + at, mask=mask, other=0.0).to(tl.float32)
        back = _norm_backward(d_out, value, outer_weight, at, mask, width, epsilon, CENTRED)
    if ADDED:
        back += tl.load(gradient + row * gradient_stride + at, mask=mask, other=0.0).to(tl.float32)
    back = back.to(kind)
    tl.store(d_total + row * width + at, back, mask=mask)
    if INNER:
        value = _half(output + row * output_stride, bias, at, mask, BIASED)
        back = _norm_backward(back.to(tl.float32), value, inner_weight, at, mask, width, epsilon, CENTRED)
        tl.store(d_output + row * width + at, back.to(kind), mask=mask)
