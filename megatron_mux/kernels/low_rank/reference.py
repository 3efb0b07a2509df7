"""Low-rank terms of many tasks by BLAS calls, group by group: exact in every dtype, on every device, the reference.

See `low_rank.product.LowRankKernels`. Terms of a task that share their input and lie next to each other in memory, such
as the A of q, k and v, are one product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_mux.kernels.dropout import keep_mask
from megatron_mux.kernels.groups import RowGroups
from megatron_mux.kernels.low_rank.product import LowRankKernels
from megatron_mux.kernels.low_rank.terms import Stack, Term, TermTable

_NARROW = 8
"""Columns of a matrix for which BLAS, whose registers hold more, takes several times as long as for its transpose."""


class LoopKernels(LowRankKernels):
    """See the module."""

    @staticmethod
    def down(x: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.down`."""
        latent = x.new_empty(x.shape[0], table.width(groups))
        for group, (start, stop), stacks in _present(table, groups):
            for stack in stacks:
                rows = _dropped(x[start:stop], stack.term, groups, group)
                torch.mm(rows, stack.down.t(), out=latent[start:stop, stack.latent])
        return latent

    @staticmethod
    def up_(y: Tensor, latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.up_`."""
        for _, (start, stop), stacks in _present(table, groups):
            rows, out = latent[start:stop], y[start:stop]
            for term, columns in _terms(stacks):
                scaled = _times(rows[:, columns], term.down_factors)
                if term.up_factors is None:
                    term.place.add_product_(out, scaled, term.up.t(), term.scale)
                else:
                    term.place.add_(out, _times(scaled @ term.up.t(), term.up_factors), term.scale)

    @staticmethod
    def latent_gradient(dy: Tensor, table: TermTable, groups: RowGroups) -> Tensor:
        """See `LowRankKernels.latent_gradient`."""
        d_latent = dy.new_empty(dy.shape[0], table.width(groups))
        for _, (start, stop), stacks in _present(table, groups):
            rows, out = dy[start:stop], d_latent[start:stop]
            for term, columns in _terms(stacks):
                scaled = _times(term.place.take(rows), term.up_factors)
                out[:, columns].addmm_(scaled, term.up, beta=0, alpha=term.scale)
        return d_latent

    @staticmethod
    def input_gradient_(dx: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups) -> None:
        """See `LowRankKernels.input_gradient_`."""
        for group, (start, stop), stacks in _present(table, groups):
            rows, out = d_latent[start:stop], dx[start:stop]
            for stack in stacks:
                scaled = _times(rows[:, stack.latent], stack.term.down_factors)
                if groups.training and stack.term.dropout:
                    out += _dropped(scaled @ stack.down, stack.term, groups, group)
                else:
                    out.addmm_(scaled, stack.down)

    @staticmethod
    def weight_gradients(
        x: Tensor, latent: Tensor, dy: Tensor, d_latent: Tensor, table: TermTable, groups: RowGroups
    ) -> None:
        """See `LowRankKernels.weight_gradients`."""
        for group, (start, stop), stacks in _present(table, groups):
            own_latent, own_gradient, own_dy = latent[start:stop], d_latent[start:stop], dy[start:stop]
            for stack in stacks:
                gradient = own_gradient[:, stack.latent]
                if stack.down_gradient is not None:
                    rows = _dropped(x[start:stop], stack.term, groups, group)
                    _add_product_(stack.down_gradient, gradient.t(), rows)
                elif (factors := stack.term.down_factors_gradient) is not None:
                    both = gradient.to(factors.dtype) * own_latent[:, stack.latent]
                    factors.add_(both.sum(dim=0))
            for term, columns in _terms(stacks):
                _up_gradient(term, own_latent[:, columns], term.place.take(own_dy))


def _up_gradient(term: Term, latent: Tensor, dy: Tensor) -> None:
    """Add the gradient of B, or of its factors, from `[n, R]` latent and `[n, columns]` output gradient."""
    if term.up_gradient is not None and term.rank > _NARROW:
        _add_product_(term.up_gradient, dy.t(), latent, term.scale)
    elif term.up_gradient is not None:
        term.up_gradient.add_((latent.t() @ dy).t(), alpha=term.scale)
    elif (factors := term.up_factors_gradient) is not None:
        outer = (dy.t() @ _times(latent, term.down_factors)).to(factors.dtype)
        factors.add_((outer * term.up).sum(dim=1), alpha=term.scale)


def _present(table: TermTable, groups: RowGroups) -> Iterator[tuple[int, tuple[int, int], tuple[Stack, ...]]]:
    """Index, rows and terms of each group whose task has terms here."""
    of_slot = table.stacks
    for group, (slot, rows) in enumerate(zip(groups.slots, groups.rows, strict=True)):
        if slot in of_slot:
            yield group, rows, of_slot[slot]


def _terms(stacks: tuple[Stack, ...]) -> Iterator[tuple[Term, slice]]:
    """Each term with its latent columns."""
    for stack in stacks:
        yield from stack.terms


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    """Columns times their factors, if any; not rounded to x's dtype before the product."""
    return x if factors is None else (x * factors).to(x.dtype)


def _dropped(x: Tensor, term: Term, groups: RowGroups, group: int) -> Tensor:
    """`[n, K]` with a term's dropout."""
    if not (groups.training and term.dropout):
        return x
    start, stop = groups.rows[group]
    features = (term.first_feature, term.first_feature + x.shape[1])
    ids, index = groups.sequence_ids[start:stop], groups.token_index[start:stop]
    mask = keep_mask(term.key, groups.steps[group], ids, index, features, term.dropout)
    return (x * mask).mul_(1.0 / (1.0 - term.dropout))


def _add_product_(out: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """Add `scale * a b` to `out`, which may have a wider dtype."""
    if out.dtype == a.dtype:
        out.addmm_(a, b, alpha=scale)
    else:
        out.add_(a @ b, alpha=scale)
