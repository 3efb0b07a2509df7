"""DoRA (Liu et al., 2024), as in peft: the output features of `W + s B A` are rescaled to trained magnitudes.

`y = m / |W + s B A| * (W x + s B A x) + b`, where the norms of rows get no gradient. The low-rank product is fused into
the BaseOp's; what is left for the stage `product` is a factor for each column. With dropout on the adapter's input,
training adds to the undisturbed output what the rescaling changes of the *dropped* input's product, which takes a
second product with the weight, as in peft.

Norms follow from those of W, which are computed once, and from products with A and B: no matrix as large as the weight
is made. They are computed where the weight is in use, once an optimizer step; tensor ranks that divide the inputs of a
row-parallel weight sum their squares then.

Shapes: n rows of the task, K and N the BaseOp's input and output width on this rank, c a module's columns, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.low_rank_kind import LowRankTerms, Product
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.dropout import keep_mask, key_of

_CHUNK = 1 << 22
"""Elements of a weight that are brought to the parameters' precision at a time."""


class DoraTerms(LowRankTerms):
    """The products of one task at one BaseOp, and the magnitudes of their columns.

    Args:
        magnitudes: `[c]` of each.
    """

    stages = frozenset({"low_rank", "product"})

    def __init__(
        self, owner: TaskAdapter, products: Sequence[Product], magnitudes: Sequence[AdapterParameter]
    ) -> None:
        super().__init__(owner, products)
        self.magnitudes = [_Magnitude(owner, *pair) for pair in zip(products, magnitudes, strict=True)]
        self.info: Any = products[0].site.info
        self._norms: tuple[tuple[int, int], Tensor] | None = None

    def product(self, x: Tensor, y: Tensor, batch: PackedBatch) -> Tensor:
        """See `Adapter.product`."""
        module, spec = self.info.module, self.owner.spec
        norms = self.norms(batch).split([len(magnitude.columns) for magnitude in self.magnitudes])
        ratios = [magnitude.value / norm for magnitude, norm in zip(self.magnitudes, norms, strict=True)]
        if batch.training and spec.dropout:
            for magnitude, ratio in zip(self.magnitudes, ratios, strict=True):
                arguments = x, *magnitude.matrices(), ratio - 1, module.weight, magnitude, batch
                change: Tensor = _DroppedChange.apply(*arguments)  # type: ignore[no-untyped-call]
                y = y.index_add(1, magnitude.columns, change)
            return y
        factors = torch.ones(y.shape[1], dtype=ratios[0].dtype, device=y.device)
        for magnitude, ratio in zip(self.magnitudes, ratios, strict=True):
            factors = factors.index_copy(0, magnitude.columns, ratio)
        has_bias = self.info.column_parallel and not module.skip_bias_add
        rescaled: Tensor = _Rescaled.apply(y, factors, module.bias if has_bias else None)  # type: ignore[no-untyped-call]
        return rescaled

    @torch.no_grad()
    def norms(self, batch: PackedBatch) -> Tensor:
        """Norms of the rows of all modules, one module after the other; computed anew after an optimizer step."""
        at = batch.task_steps[self.owner.name], self.owner.flat_params.version
        if self._norms is not None and self._norms[0] == at:
            return self._norms[1]
        squares = torch.cat([magnitude.squares(self.info.module.weight) for magnitude in self.magnitudes])
        parallel = self.owner.host.parallel
        if parallel.tp_size > 1 and not self.info.column_parallel:
            dist.all_reduce(squares, group=parallel.tp_group)
        norms = squares.clamp_(min=0.0).sqrt_()
        self._norms = at, norms
        return norms


class _Magnitude:
    """The magnitudes of one module's columns, with the product that they rescale."""

    def __init__(self, owner: TaskAdapter, product: Product, magnitude: AdapterParameter) -> None:
        self.owner, self.product, self.magnitude = owner, product, magnitude
        site = product.site
        self.columns = site.part.columns.to(magnitude.value.device)
        self.every = owner.host.columns(site) is None
        self._of_weight: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """`[c]`."""
        return self.magnitude.value

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B in the compute dtype, through which autograd reaches the parameters."""
        down, up = self.product.down, self.product.up
        assert isinstance(down, AdapterParameter) and isinstance(up, AdapterParameter)
        return self.owner.flat_params.rounded(down), self.owner.flat_params.rounded(up)

    def rows(self, weight: Tensor) -> Tensor:
        """`[c, K]` of the BaseOp's weight `[N, K]`."""
        if self.every:
            return weight
        place = self.owner.host.place(self.product.site)
        if place.index is None and place.count == 1:
            return weight[place.start : place.start + place.run]
        return weight.index_select(0, self.columns)

    def keep(self, batch: PackedBatch, width: int) -> Tensor:
        """`[n, K]` bool, the mask that the fused product drops entries of the module's input by."""
        owner, site = self.owner, self.product.site
        start, stop = batch.task_rows[owner.name]
        first = site.info.inputs.start
        return keep_mask(
            key_of(owner.seed, owner.spec.dropout_field, site.path),
            batch.task_steps[owner.name],
            batch.groups.sequence_ids[start:stop],
            batch.groups.token_index[start:stop],
            (first, first + width),
            owner.spec.dropout,
        )

    def squares(self, weight: Tensor) -> Tensor:
        """`[c]` squared norms of rows of `W + s B A`, over the inputs that this rank holds."""
        down, up = (_value(matrix) for matrix in (self.product.down, self.product.up))
        if self.product.subtracted is not None:
            first_down, first_up = (matrix.to(down.dtype) for matrix in self.product.subtracted)
            down, up = torch.cat((down, first_down)), torch.cat((up, -first_up), dim=1)
        rows, scale = self.rows(weight), self.product.scale
        chunks = [rows] if rows.dtype == down.dtype else rows.split(max(1, _CHUNK // rows.shape[1]))
        wide = [chunk.to(down.dtype) @ down.t() for chunk in chunks]
        if self._of_weight is None:
            squares = [torch.linalg.vector_norm(chunk.to(down.dtype), dim=1).square() for chunk in chunks]
            self._of_weight = torch.cat(squares)
        inner = torch.cat(wide).mul_(2 * scale).addmm_(up, down @ down.t(), alpha=scale * scale)
        return self._of_weight + inner.mul_(up).sum(dim=1)


def _value(matrix: AdapterParameter | Tensor) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.value.detach()


class _Rescaled(torch.autograd.Function):
    """`(y - b) * factors + b`; of large tensors only y is kept, in the backbone's dtype."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
        # A view would keep the rows of all tasks.
        kept = y.clone() if y.untyped_storage().nbytes() > y.nbytes else y
        ctx.save_for_backward(kept, factors, bias)
        product = y if bias is None else y - bias
        return torch.add(y, product * (factors - 1)).to(y.dtype)  # exact where a factor is one

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, factors, bias = ctx.saved_tensors
        product = y if bias is None else y - bias
        d_factors = (product * dy.to(factors.dtype)).sum(dim=0)
        return (dy * factors).to(y.dtype), d_factors, None


@dataclass(frozen=True)
class _Pieces:
    """What both passes of `_DroppedChange` need.

    Attributes:
        x: `[n, K]` dropped input.
        latent: `[n, R]`.
        y: `[n, c]` product of the dropped input with the whole adapted weight.
    """

    x: Tensor
    latent: Tensor
    y: Tensor

    @classmethod
    def of(
        cls, x: Tensor, down: Tensor, up: Tensor, weight: Tensor, magnitude: _Magnitude, keep: Tensor
    ) -> _Pieces:
        """Compute them, with a mask `[n, K]`."""
        x = (x * keep).mul_(1.0 / (1.0 - magnitude.owner.spec.dropout))
        latent = F.linear(x, down)
        y = F.linear(x, magnitude.rows(weight)).add_(latent @ up.t(), alpha=magnitude.product.scale)
        if magnitude.product.subtracted is not None:
            first_down, first_up = magnitude.product.subtracted
            y.sub_(F.linear(x, first_down) @ first_up.t(), alpha=magnitude.product.scale)
        return cls(x, latent, y)


class _DroppedChange(torch.autograd.Function):
    """What a rescaling by `1 + change` adds to a module's output in training with dropout: `change * (W + s B A) x'`.

    Nothing is kept but the input, which the BaseOp keeps anyway; the backward pass computes the rest again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        down: Tensor,
        up: Tensor,
        change: Tensor,
        weight: Tensor,
        magnitude: _Magnitude,
        batch: PackedBatch,
    ) -> Tensor:
        ctx.save_for_backward(x, down, up, change, weight)
        ctx.magnitude, ctx.batch = magnitude, batch
        keep = magnitude.keep(batch, x.shape[1])
        return (_Pieces.of(x, down, up, weight, magnitude, keep).y * change).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, change, weight = ctx.saved_tensors
        magnitude: _Magnitude = ctx.magnitude
        keep = magnitude.keep(ctx.batch, x.shape[1])
        scale = magnitude.product.scale
        pieces = _Pieces.of(x, down, up, weight, magnitude, keep)
        d_change = (pieces.y * dy.to(change.dtype)).sum(dim=0)
        d_product = (dy * change).to(x.dtype)
        d_latent = (d_product @ up).mul_(scale)
        d_up = (d_product.t() @ pieces.latent).mul_(scale)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (d_product @ magnitude.rows(weight)).add_(d_latent @ down)
            if magnitude.product.subtracted is not None:
                first_down, first_up = magnitude.product.subtracted
                dx.sub_((d_product @ first_up) @ first_down, alpha=scale)
            dx = (dx * keep).mul_(1.0 / (1.0 - magnitude.owner.spec.dropout))
        return dx, d_latent.t() @ pieces.x, d_up, d_change, None, None, None
