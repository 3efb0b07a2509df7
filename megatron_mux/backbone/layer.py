"""Computing one layer: its MLP on all rows or on labelled ones, kept for the backward or computed again there.

Shapes: T tokens in the micro-batch, N labelled ones, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_mux.backbone.rotary import Angles
from megatron_mux.backbone.sublayers import FrozenNorm, OutputNorm
from megatron_mux.batch.packed_batch import activate, active
from megatron_mux.kernels.pointwise.functions import fork, join


class LayersPass:
    """A pass through the layers of a stage whose weights are in place.

    Args:
        hidden: Input of the first layer.

    Attributes:
        hidden: Output of the layers so far.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def through(self, key: int, compute: Callable[[Tensor], Tensor]) -> None:
        """Run the stage's layer `key` by calling `compute`."""
        self.hidden = compute(self.hidden)


def compute_layer(
    layer: nn.Module, hidden: Tensor, angles: Angles | None, labelled_only: bool, recompute: bool
) -> Tensor:
    """Compute a Megatron layer on the active micro-batch.

    Args:
        hidden: `[T, 1, H]`.
        angles: The rotary angles of the tokens; None without rotary embedding.
        labelled_only: Compute the MLP on labelled rows only: above attention no row looks at another.
        recompute: Keep the input alone, and compute the layer again in the backward.

    Returns:
        `[T, 1, H]`; `[N, 1, H]` with `labelled_only`.
    """
    compute = _without_rows if not len(hidden) else _labelled if labelled_only else _whole
    if not (recompute and torch.is_grad_enabled()):
        return compute(layer, hidden, angles)
    # Not Megatron's own: that is blind to adapters below which nothing needs a gradient.
    output: Tensor = checkpoint(
        _all_before_backward, compute, layer, hidden, angles, use_reentrant=False, preserve_rng_state=False
    )
    return output


class _Entrance(torch.autograd.Function):
    """Identity whose backward, the first of its layer, asks for a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _ = ctx.saved_tensors
        return gradient


def _all_before_backward(compute: Any, *arguments: Any) -> Tensor:
    """A layer to recompute, all of it before its backward begins.

    Else recomputation would begin where a saved tensor is first asked for. With sequence parallelism that may be an
    adapter that only this rank has rows for, and another rank would begin after a collective of the layer's backward:
    each would wait for the other.
    """
    output: Tensor = _Entrance.apply(compute(*arguments))  # type: ignore[no-untyped-call]
    return output


def _whole(layer: Any, hidden: Tensor, angles: Angles | None) -> Tensor:
    residual, normed = before_attention(layer, hidden)
    residual, normed = before_mlp(layer, attend(layer, normed, angles), residual)
    return after_mlp(layer, layer.mlp(normed), residual)


def _labelled(layer: Any, hidden: Tensor, angles: Angles | None) -> Tensor:
    """The same, its MLP on labelled rows only: `[T, 1, H]` to `[N, 1, H]`."""
    batch = active()
    residual, normed = before_attention(layer, hidden)
    residual, normed = before_mlp(layer, attend(layer, normed, angles), residual, batch.label_rows)
    with activate(batch.labelled):
        return after_mlp(layer, layer.mlp(normed), residual)


def _without_rows(layer: Any, hidden: Tensor, angles: Angles | None) -> Tensor:
    """Experts alone: they may compute rows of other ranks."""
    if isinstance(layer, nn.ModuleDict):  # an expert manager has nothing else of it
        return layer["mlp"](hidden)[0]  # type: ignore[no-any-return]
    return mlp_half(layer, hidden)


def attention_half(layer: Any, hidden: Tensor, angles: Angles | None) -> Tensor:
    """The first half of a layer by itself: `[T, 1, H]` to the same with attention added."""
    residual, normed = before_attention(layer, hidden)
    return add_residual(layer.self_attn_bda, attend(layer, normed, angles), residual)[0]


def mlp_half(layer: Any, hidden: Tensor) -> Tensor:
    """The second half by itself: `[T, 1, H]` to the same with the MLP added."""
    residual, normed = fork(hidden, layer.pre_mlp_layernorm.frozen)
    return after_mlp(layer, layer.mlp(normed), residual)


# ---- what lies between a layer's messages: `layer_pieces` has these functions compute it piece by piece ------------


def before_attention(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The hidden states `[T, 1, H]`, for the residual sum, and their norm."""
    return fork(hidden, layer.input_layernorm.frozen)


def attend(layer: Any, normed: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor | None]:
    """Attention's output of `[T, 1, H]`, and its bias `[H]`, which is not added yet; None: it has none."""
    output: tuple[Tensor, Tensor | None] = layer.self_attention(
        normed, attention_mask=None, attention_bias=angles
    )
    return output


def before_mlp(
    layer: Any, attended: tuple[Tensor, Tensor | None], residual: Tensor, label_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add attention's output to the hidden states, and normalise the sum.

    Args:
        attended: `[T, 1, H]` and a bias `[H]` or None.
        residual: `[T, 1, H]`.
        label_rows: `[N]`, the rows that are needed from here on; None: all of them.

    Returns:
        The sum, for the next residual sum, and its norm: `[T, 1, H]`, or `[N, 1, H]` with `label_rows`.
    """
    norm = layer.pre_mlp_layernorm
    if label_rows is not None:
        total = add_residual(layer.self_attn_bda, attended, residual)[0].index_select(0, label_rows)
        return fork(total, norm.frozen)
    total, normed = add_residual(layer.self_attn_bda, attended, residual, norm)
    assert normed is not None
    return total, normed


def after_mlp(layer: Any, output: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
    """Add the MLP's output `[R, 1, H]`, its bias included, to the hidden states `[R, 1, H]`."""
    return add_residual(layer.mlp_bda, output, residual)[0]


def add_residual(
    bda: Any, output: tuple[Tensor, Tensor | None], residual: Tensor, norm: FrozenNorm | None = None
) -> tuple[Tensor, Tensor | None]:
    """Add what a sublayer returns, its bias included, to the hidden states.

    Args:
        bda: What the layer has in the place of Megatron's bias-dropout-add: an `OutputNorm`, or something without
            effect here, where nothing is dropped.
        output: `[T, 1, H]` and a bias `[H]` or None.
        residual: The hidden states `[T, 1, H]`.
        norm: Of the sum; None: nobody needs it.

    Returns:
        The sum and its norm.
    """
    inner = bda.norm.frozen if isinstance(bda, OutputNorm) else None
    return join(*output, residual, inner, None if norm is None else norm.frozen)
