"""A frozen linear product and the low-rank terms of many tasks, as one operation with one backward.

MuxTune sections 3.2 and 3.4.3: the BaseOp is computed once for all tasks, their LoRA adapters in a fused manner.
`low_rank_linear` computes `y = x W^T (+ b)` and adds every task's term into its rows of `y`; its backward computes
`dx = dy W`, adds the terms' share into the rows of `dx`, and the small gradients. Nothing as large as `x` or `y` is
made besides those two, and `x` is kept once for all terms. A task's terms on one BaseOp (q and v, say) are computed
together: their A lie on top of each other, their B in the columns that each of them owns.

Shapes: T rows, K and N the product's input and output width, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.adapters.adapter import LowRankTerm
from megatron_mux.kernels.grouped import Products, Rows, choose

TaskTerms = tuple[tuple[int, int], Sequence[LowRankTerm]]  # a task's rows and its terms


@dataclass(frozen=True)
class _Group:
    """Terms that share rows, input and factor: one down- and one up-product.

    `first` is the index of the first term's A among the operation's parameters; A and B alternate.
    """

    rows: tuple[int, int]
    ranks: tuple[int, ...]
    columns: tuple[Tensor | None, ...]
    scale: float
    keep_scale: float
    first: int

    @property
    def rank(self) -> int:
        return sum(self.ranks)


def low_rank_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tasks: Sequence[TaskTerms]) -> Tensor:
    """`x W^T + b`, with each task's low-rank terms added to its rows.

    Args:
        x: `[T, K]`.
        weight: `[N, K]`, frozen.
        bias: `[N]`, frozen, or None.
        tasks: Rows and terms of each task, in row order.

    Returns:
        `[T, N]`.
    """
    plain: list[_Group] = []
    dropped: list[_Group] = []
    masks: list[Tensor] = []
    parameters: list[Tensor] = []
    for rows, terms in tasks:
        for same in _together(terms):
            ranks, columns = tuple(t.down.shape[0] for t in same), tuple(t.columns for t in same)
            group = _Group(rows, ranks, columns, same[0].scale, same[0].keep_scale, len(parameters))
            parameters += [p for t in same for p in (t.down, t.up)]
            if same[0].keep is None:
                plain.append(group)
            else:
                dropped.append(group)
                masks.append(same[0].keep)
    result: Tensor = _LowRankLinear.apply(x, weight, bias, plain, dropped, masks, *parameters)  # type: ignore[no-untyped-call]
    return result


def _together(terms: Sequence[LowRankTerm]) -> list[list[LowRankTerm]]:
    """Group terms that share their input: those without dropout. With dropout each has its own mask."""
    if not terms or any(t.keep is not None or t.scale != terms[0].scale for t in terms):
        return [[t] for t in terms]
    return [list(terms)]


class _LowRankLinear(torch.autograd.Function):
    """The operation that the module's docstring describes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plain: list[_Group],
        dropped: list[_Group],
        masks: list[Tensor],
        *parameters: Tensor,
    ) -> Tensor:
        y = x @ weight.t()
        if bias is not None:
            y += bias
        downs = [_stack_down(g, parameters, x.dtype) for g in plain + dropped]
        ups = [_spread_up(g, parameters, y) for g in plain + dropped]
        count = len(plain)
        h = None
        if plain:
            rows = tuple(g.rows for g in plain)
            products = choose(x, rows)
            h = products.project(x, rows, downs[:count])
            products.expand_(y, rows, h, ups[:count], [g.scale for g in plain])
        latent = []
        for group, mask, down, up in zip(dropped, masks, downs[count:], ups[count:], strict=True):
            start, stop = group.rows
            latent.append(_dropped(x, group, mask) @ down.t())
            y[start:stop].addmm_(latent[-1], up.t(), alpha=group.scale)
        # Without parameters to train nothing but W is needed again.
        kept = (x, h, *latent, *masks, *downs, *ups) if parameters else ()
        ctx.save_for_backward(weight, *kept)
        ctx.plain, ctx.dropped = plain, dropped
        ctx.parameter_dtypes = [p.dtype for p in parameters]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if not kept:
            return (dx, None, None, None, None, None)
        plain, dropped = ctx.plain, ctx.dropped
        x, h = kept[:2]
        n = len(dropped)
        latent, masks = kept[2 : 2 + n], kept[2 + n : 2 + 2 * n]
        matrices = kept[2 + 2 * n :]
        downs, ups = matrices[: len(matrices) // 2], matrices[len(matrices) // 2 :]
        gradients: list[Tensor | None] = [None] * len(ctx.parameter_dtypes)
        dy = dy.contiguous()
        if plain:
            rows = tuple(g.rows for g in plain)
            count = len(plain)
            pairs = _plain_backward(choose(dy, rows), rows, plain, dy, x, h, downs[:count], ups[:count], dx)
            for group, (d_down, d_up) in zip(plain, pairs, strict=True):
                _hand_out(group, d_down, d_up, ctx.parameter_dtypes, gradients)
        groups = zip(dropped, latent, masks, downs[len(plain) :], ups[len(plain) :], strict=True)
        for group, own, mask, down, up in groups:
            start, stop = group.rows
            dh = (dy[start:stop] @ up).mul_(group.scale)
            d_up = (own.t() @ dy[start:stop]).mul_(group.scale)
            d_down = dh.t() @ _dropped(x, group, mask)
            _hand_out(group, d_down, d_up, ctx.parameter_dtypes, gradients)
            if dx is not None:
                dx[start:stop] += (dh @ down).mul_(mask).mul_(group.keep_scale)
        return (dx, None, None, None, None, None, *gradients)


def _plain_backward(
    products: type[Products],
    rows: Rows,
    groups: Sequence[_Group],
    dy: Tensor,
    x: Tensor,
    h: Tensor,
    downs: Sequence[Tensor],
    ups: Sequence[Tensor],
    dx: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of the stacked A and the spread B (transposed) of each group; adds to `dx`."""
    scales = [g.scale for g in groups]
    ranks = [g.rank for g in groups]
    dh = products.project(dy, rows, [up.t() for up in ups])  # scale still to come
    if dx is not None:
        products.expand_(dx, rows, dh, [down.t() for down in downs], scales)
    d_downs = products.outer(dh, x, rows, ranks, scales)
    d_ups = products.outer(h, dy, rows, ranks, scales)
    return list(zip(d_downs, d_ups, strict=True))


def _hand_out(
    group: _Group, d_down: Tensor, d_up: Tensor, dtypes: Sequence[torch.dtype], gradients: list[Tensor | None]
) -> None:
    """Cut a group's gradients (`[R, K]` and, transposed, `[R, N]`) into those of its parameters."""
    at = 0
    for i, (rank, columns) in enumerate(zip(group.ranks, group.columns, strict=True)):
        down, up = d_down[at : at + rank], d_up[at : at + rank]
        if columns is not None:
            up = up.index_select(1, columns)
        a, b = group.first + 2 * i, group.first + 2 * i + 1
        gradients[a] = down.to(dtypes[a])
        gradients[b] = up.t().contiguous().to(dtypes[b])
        at += rank


def _dropped(x: Tensor, group: _Group, mask: Tensor) -> Tensor:
    start, stop = group.rows
    return (x[start:stop] * mask).mul_(group.keep_scale)


def _stack_down(group: _Group, parameters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`[R, K]`: the A of a group's terms on top of each other."""
    downs = [parameters[group.first + 2 * i] for i in range(len(group.ranks))]
    return (downs[0] if len(downs) == 1 else torch.cat(downs)).to(dtype)


def _spread_up(group: _Group, parameters: Sequence[Tensor], y: Tensor) -> Tensor:
    """`[N, R]`: the B of a group's terms in their columns, zero elsewhere."""
    ups = [parameters[group.first + 2 * i + 1] for i in range(len(group.ranks))]
    if len(ups) == 1 and group.columns[0] is None:
        return ups[0].to(y.dtype)
    spread = y.new_zeros(y.shape[1], group.rank)
    at = 0
    for up, rank, columns in zip(ups, group.ranks, group.columns, strict=True):
        place = spread[:, at : at + rank]
        if columns is None:
            place.copy_(up)
        else:
            place.index_copy_(0, columns, up.to(y.dtype))
        at += rank
    return spread
