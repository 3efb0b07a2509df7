"""Element-wise operations between the products of a frozen layer, each fused to one kernel a direction, with autograd.

Three operations, each one launch a direction on a GPU: the MLP's activation (`activate`), a norm with the residual sum
before it (`join`, `normalise`), and queries, keys and values out of their common product, normalised and rotated
(`turn`). Weights are frozen: gradients are those of activations alone, and what a backward pass needs is computed
again from its input. Elsewhere, and in fp64, torch's operators compute the same.

Shapes: T rows, H hidden, F inner width of an MLP, h query heads and g key-value heads of D features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.kernels.pointwise.arguments import Heads, JoinedNorms, Norm
from megatron_mux.kernels.pointwise.choice import PointwiseKernels, pointwise_kernels
from megatron_mux.kernels.pointwise.reference import ACTIVATIONS, gated, rms_norm, rotate

# ---- activations ----------------------------------------------------------------------------------------------------


def activation(name: str, gate: bool) -> Callable[..., Tensor]:
    """The function between an MLP's products: takes `x` and a bias or None, see `activate`."""
    return partial(activate, name=name, gate=gate)


def activate(x: Tensor, bias: Tensor | None = None, *, name: str, gate: bool) -> Tensor:
    """`[..., F]` to `activation(x + bias)`; with a gate `[..., 2 F]`, gate before up, to `activation(gate) * up`.

    Args:
        x: The product.
        bias: Frozen, of x's width; None: there is none.
        name: Hugging Face's name of the activation function.
        gate: Whether the MLP is gated.
    """
    kernels = pointwise_kernels(type(x), x.device, x.dtype)
    if kernels is not None:
        out: Tensor = _Activate.apply(x, bias, name, gate, kernels)  # type: ignore[no-untyped-call]
        return out
    if bias is not None:
        x = x + bias
    if not gate:
        return ACTIVATIONS[name](x)
    fused = gated(name)
    if fused is not None:
        return fused(x)
    half, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[name](half) * up


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, name: str, gate: bool, kernels: PointwiseKernels
    ) -> Tensor:
        width = x.shape[-1] // 2 if gate else x.shape[-1]
        out = x.new_empty(*x.shape[:-1], width)
        kernels.activate(_rows(out), _rows(x), bias, name, gate)
        # ReLU goes backward by its output, which the next product may have to keep anyway.
        by_output = name == "relu" and not gate
        ctx.save_for_backward(*((out, None) if by_output else (x, bias)))
        ctx.of = name, gate, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        name, gate, kernels = ctx.of
        d_x = x.new_empty(x.shape)
        kernels.activate_backward(_rows(d_x), _rows(gradient), _rows(x), bias, name, gate)
        return d_x, None, None, None, None


# ---- norms and residual sums ----------------------------------------------------------------------------------------


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """`[..., H]` to its norm."""
    return fork(x, norm)[1]


def fork(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """`x` for the residual sum, and its norm: the gradients of both are added in the norm's backward pass."""
    kernels = pointwise_kernels(type(x), x.device, x.dtype)
    if kernels is None:
        return x, _plain_norm(x, norm)
    same, normed = _join(x, None, None, (None, norm), kernels)
    assert normed is not None
    return same, normed


def join(
    output: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    inner: Norm | None = None,
    outer: Norm | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Add what a sublayer returns to the hidden states, and normalise the sum for the next one.

    Args:
        output: `[..., H]`.
        bias: `[H]`, added to it; None: there is none.
        residual: `[..., H]`, the hidden states.
        inner: A norm of the output, applied before it is added.
        outer: The norm of the sum; None: nobody needs it.

    Returns:
        The sum, and its norm.
    """
    kernels = pointwise_kernels(type(output), output.device, output.dtype)
    if kernels is not None and any(t is not None for t in (bias, inner, outer)):
        return _join(output, bias, residual, (inner, outer), kernels)
    if bias is not None:
        output = output + bias
    total = residual + (output if inner is None else _plain_norm(output, inner))
    return total, None if outer is None else _plain_norm(total, outer)


def _plain_norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.centred:
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)
    return rms_norm(x, norm.weight, norm.eps)


def _join(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    joined: tuple[Tensor, Tensor | None] = _Join.apply(*arguments)  # type: ignore[no-untyped-call]
    return joined


class _Join(torch.autograd.Function):
    """See `join`; without a residual `fork`."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        norms: JoinedNorms,
        kernels: PointwiseKernels,
    ) -> tuple[Tensor, Tensor | None]:
        inner, outer = norms
        total = None if residual is None else output.new_empty(output.shape)
        normed = None if outer is None else output.new_empty(output.shape)
        kernels.join(_rows(total), _rows(normed), _rows(output), bias, _rows(residual), norms)
        whole = output if total is None else total
        # The sum is kept for its norm; what is added to it, for a norm of its own.
        added = (None, None) if inner is None else (output, bias)
        ctx.save_for_backward(None if outer is None else whole, *added)
        ctx.of = norms, kernels, residual is not None
        ctx.set_materialize_grads(False)
        return (output.view_as(output) if total is None else total), normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, d_normed: Tensor | None) -> tuple[Tensor | None, ...]:
        total, output, bias = ctx.saved_tensors
        (inner, outer), kernels, added = ctx.of
        some = gradient if d_normed is None else d_normed
        if some is None or (inner is None and d_normed is None):
            return gradient, None, gradient if added else None, None, None
        d_total = some.new_empty(some.shape)
        d_output = d_total if inner is None else some.new_empty(some.shape)
        kernels.join_backward(
            _rows(d_total),
            None if inner is None else _rows(d_output),
            _rows(gradient),
            _rows(d_normed),
            _rows(total if total is not None else d_total),
            _rows(output),
            bias,
            (inner, outer),
        )
        return d_output, None, d_total if added else None, None, None


# ---- queries, keys and values ---------------------------------------------------------------------------------------


def turn(mixed: Tensor, angles: tuple[Tensor, Tensor] | None, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of their common product, the former two normalised and rotated.

    Args:
        mixed: `[T, 1, (h + 2 g) D]`: of each group its query heads, a key head, and a value head.
        angles: Cosine and sine `[T, 1, W / 2]`, W at most D; None: nothing is rotated.
        heads: With keys.

    Returns:
        `[T, h, D]`, `[T, g, D]` and `[T, g, D]`.
    """
    kernels = pointwise_kernels(type(mixed), mixed.device, mixed.dtype)
    if kernels is not None and angles is not None:
        by_head = mixed.reshape(len(mixed), -1, heads.size)
        turned: tuple[Tensor, Tensor, Tensor] = _Turn.apply(by_head, *angles, heads, kernels)  # type: ignore[no-untyped-call]
        return turned
    query, key, value = split_heads(mixed, heads)
    of_query, of_key = heads.weights
    if of_query is not None and of_key is not None:
        query, key = rms_norm(query, of_query, heads.eps), rms_norm(key, of_key, heads.eps)
    if angles is not None:
        query, key = rotate(query, *angles), rotate(key, *angles)
    return query, key, value


def split_heads(mixed: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views, but for query heads that share keys: they are copied."""
    size = heads.size
    groups = mixed.reshape(len(mixed), -1, (heads.queries + 2) * size)
    query, key, value = groups.split([heads.queries * size, size, size], dim=-1)
    return query.reshape(len(mixed), -1, size), key, value


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, first: int = 0, interleaved: bool = False) -> Tensor:
    """Rotate features of `[T, h, D]` from `first` on; the others stay.

    Args:
        x: Queries or keys.
        cos: `[T, 1, W / 2]`, in its own dtype, in which torch's operators rotate.
        sin: Likewise.
        first: Of W features.
        interleaved: Whether the features of a rotated pair are neighbours; they come out in halves.
    """
    kernels = pointwise_kernels(type(x), x.device, x.dtype)
    if kernels is not None:
        heads = Heads(x.shape[2], x.shape[1], keyed=False, first=first, interleaved=interleaved)
        rotated: Tensor = _Turn.apply(x, cos, sin, heads, kernels)[0]  # type: ignore[no-untyped-call]
        return rotated
    before, part = x.split([first, x.shape[2] - first], dim=-1)
    if interleaved:
        part = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
    part = rotate(part.to(cos.dtype), cos, sin).to(x.dtype)
    return torch.cat((before, part), dim=-1) if first else part


class _Turn(torch.autograd.Function):
    """`[T, heads, D]` to queries, keys and values."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, cos: Tensor, sin: Tensor, heads: Heads, kernels: PointwiseKernels
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        mixed = _features(mixed)
        rows, count, size = mixed.shape
        groups = count // (heads.queries + 2 * heads.keyed)
        query = mixed.new_empty(rows, groups * heads.queries, size)
        key = mixed.new_empty(rows, groups, size) if heads.keyed else None
        value = mixed.new_empty(rows, groups, size) if heads.keyed else None
        kernels.turn(query, key, value, mixed, cos, sin, heads)
        ctx.save_for_backward(cos, sin, mixed if heads.weights[0] is not None else None)
        ctx.of = mixed.shape, heads, kernels
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin, mixed = ctx.saved_tensors
        shape, heads, kernels = ctx.of
        grads = [None if g is None else _features(g) for g in gradients]
        d_mixed = cos.new_empty(shape, dtype=next(g.dtype for g in grads if g is not None))
        kernels.turn_backward(d_mixed, *grads, mixed, cos, sin, heads)
        return d_mixed, None, None, None, None


def _rows(x: Tensor | None) -> Tensor | None:
    """`[T, N]` of a tensor, whose rows are contiguous."""
    return None if x is None else _features(x.reshape(-1, x.shape[-1]))


def _features(x: Tensor) -> Tensor:
    """The tensor, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
