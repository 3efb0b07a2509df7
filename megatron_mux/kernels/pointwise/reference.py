"""Small operations between a frozen backbone's products, with gradients for activations only.

Written out by hand because autograd's own chain for them takes many passes over memory on a CPU, a tenth of a training
step in all, and keeps intermediates that the input alone replaces.
Shapes: T tokens, H hidden, F inner width of the MLP, h heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_TANH_GELU = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""Activation functions of MLPs, by Hugging Face's names."""


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        dtype, width = x.dtype, x.shape[-1]
        if dtype.itemsize < 4:
            x, weight, grad = x.float(), weight.float(), grad.float()
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = square.div_(width).add_(ctx.eps).rsqrt_()
        back = grad * weight
        along = (back * x).sum(dim=-1, keepdim=True)
        along.mul_(scale).mul_(scale).mul_(scale).div_(-width)
        return back.mul_(scale).addcmul_(x, along).to(dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; `weight` is frozen."""
    if x.device.type != "cpu" or not (torch.is_grad_enabled() and x.requires_grad):
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _silu_backward(grad: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, gate, grad_input=out)


def _gelu_backward(approximate: str, grad: Tensor, gate: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, gate, approximate=approximate, grad_input=out)


_BACKWARD: dict[Any, Callable[[Tensor, Tensor, Tensor], None]] = {
    F.silu: _silu_backward,
    F.gelu: partial(_gelu_backward, "none"),
    _TANH_GELU: partial(_gelu_backward, "tanh"),
}
"""Gradients of activation functions, written to their last argument."""


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, up = x.chunk(2, dim=-1)
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        back = torch.empty_like(x)
        back_gate, back_up = back.chunk(2, dim=-1)
        torch.mul(grad, ctx.activation(gate), out=back_up)
        _BACKWARD[ctx.activation](grad * up, gate, back_gate)
        return back, None


def gated(activation: str) -> Callable[[Tensor], Tensor] | None:
    """The function of a gated MLP: `[..., 2 F]`, gate before up, to `activation(gate) * up`, keeping its input only.

    Args:
        activation: Hugging Face's name of the activation function.

    Returns:
        The function; None where it is not written out here.
    """
    chosen = ACTIVATIONS[activation]

    def function(x: Tensor) -> Tensor:
        out: Tensor = _Gated.apply(x, chosen)  # type: ignore[no-untyped-call]
        return out

    return function if chosen in _BACKWARD else None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = 2 * cos.shape[-1]
    (x1, x2), (out1, out2) = x[..., :width].chunk(2, dim=-1), out[..., :width].chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=direction)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The inverse of a rotation is its transpose: the same, backwards.
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: turn each pair (i, i + W/2) of the first W features by its angle; leave the others.

    Args:
        x: `[T, h, D]`.
        cos: `[T, 1, W / 2]`, in x's dtype, W at most D.
        sin: Likewise.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out
