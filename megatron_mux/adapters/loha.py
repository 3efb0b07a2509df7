"""LoHa (Hyeon-Woo et al., 2022), as in peft: a weight changes by two low-rank matrices, multiplied element by element.

`y += alpha / r * x ((A1 B1) * (A2 B2))^T`, with A1 and A2 `[c, r]`, B1 and B2 `[r, K]`. That is a low-rank product
itself, of rank r^2 at most: one factor holds each row of B1 times each of B2, the other each column of A1 times each
of A2. With r at most 16 or so they are small beside the weight. On a column-parallel BaseOp A1 and A2 are divided as
the output is; on a row-parallel one B1 and B2 are divided as the input is. What is whole has a partial gradient.

Shapes: n rows of the task, K the BaseOp's input width on this rank, c a module's columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Work
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.low_rank_kind import LowRankSpec
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import SAVER_FIELDS, PeftField, bookkeeping, initial_values, not_yet
from megatron_mux.adapters.selection import Alphas, Ranks, value_of
from megatron_mux.adapters.tensors import AdapterTensor, constant, uniform
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.errors import UserError
from megatron_mux.section import LARGEST_SIZE, Modules, Targets, TidyNumber
from megatron_mux.shape import BackboneShape, Module


@dataclass(frozen=True)
class _Change:
    """The change of one module's weight.

    Attributes:
        factors: A1, B1, A2 and B2 on this rank.
        columns: Its columns of the BaseOp's output; None: all.
    """

    factors: Sequence[AdapterParameter]
    scale: float
    columns: Tensor | None


class _Changes(Adapter):
    """The changes of one task at one BaseOp."""

    stages = frozenset({"product"})

    def __init__(self, changes: Sequence[_Change]) -> None:
        self.changes = changes

    def product(self, x: Tensor, y: Tensor, batch: PackedBatch) -> Tensor:
        """See `Adapter.product`."""
        for change_of_op in self.changes:
            factors = (factor.value for factor in change_of_op.factors)
            added: Tensor = _ChangeProduct.apply(x, *factors, change_of_op.scale)  # type: ignore[no-untyped-call]
            y = y + added if change_of_op.columns is None else y.index_add(1, change_of_op.columns, added)
        return y


class _ChangeProduct(torch.autograd.Function):
    """`[n, c]`: rows times the change. Only rows and factors are kept, the products of factors are made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, a1, b1, a2, b2)
        ctx.scale = scale
        down, up = _products(b1, b2).to(x.dtype), _products(a1.t(), a2.t()).to(x.dtype)
        return (x @ down.t()).mul_(scale) @ up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a1, b1, a2, b2 = ctx.saved_tensors
        down, up = _products(b1, b2).to(x.dtype), _products(a1.t(), a2.t()).to(x.dtype)
        d_latent = (dy @ up.t()).mul_(ctx.scale)
        dx = d_latent @ down if ctx.needs_input_grad[0] else None
        d_b1, d_b2 = _gradients(d_latent.t() @ x, b1, b2)
        latent = (x @ down.t()).mul_(ctx.scale)
        d_a1, d_a2 = _gradients(latent.t() @ dy, a1.t(), a2.t())
        return dx, d_a1.t(), d_b1, d_a2.t(), d_b2, None


def _products(first: Tensor, second: Tensor) -> Tensor:
    """`[r^2, w]`: each row of one matrix `[r, w]` times each row of another, elementwise."""
    return (first[:, None] * second[None]).flatten(0, 1)


def _gradients(d_products: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both matrices from that of `_products`."""
    by_pair = d_products.to(first.dtype).view(len(first), len(second), -1)
    return torch.einsum("ijw,jw->iw", by_pair, second), torch.einsum("ijw,iw->jw", by_pair, first)


class Loha(TaskAdapter):
    """LoHa of one task."""

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> _Changes:
        """See `TaskAdapter.adapt`."""
        return _Changes(
            [
                _Change(factors, self.spec.scale_of(site.module), self.host.columns(site))
                for site, factors in modules
            ]
        )


class LohaSpec(LowRankSpec):
    """LoHa (`peft.LoHaConfig`)."""

    peft_type: Literal["LOHA"]
    """The method."""
    r: int = Field(default=8, ge=1, le=LARGEST_SIZE)
    """Rank of the two products that are multiplied: the change has its square."""
    alpha: TidyNumber = Field(default=8, gt=0)
    """The change is scaled by `alpha / r`."""
    rank_pattern: Ranks = Field(default_factory=dict)
    """Ranks of modules that differ from `r`, by the end of their path or a regular expression for it."""
    alpha_pattern: Alphas = Field(default_factory=dict)
    """Their `alpha`, likewise."""
    target_modules: Targets = None
    """Modules that get an adapter; None: the ones peft would choose for the backbone's family."""
    exclude_modules: Modules = None
    """Modules that get no adapter though `target_modules` names them; text is a regular expression."""

    run_time = Loha
    sample_ranks = (16, 256)
    refused: ClassVar[Mapping[str, PeftField]] = {
        **SAVER_FIELDS,
        **not_yet(0.0, "rank_dropout", "module_dropout", neutral=(None, 0, 0.0)),
        **bookkeeping(use_effective_conv2d=False),  # of convolutions
        **initial_values("init_weights"),
    }

    def modules(self, shape: BackboneShape) -> list[Module]:
        """See `AdapterSpec.modules`."""
        if shape.names.transposed:
            raise UserError(
                f"LOHA is not possible for the transposed weights of a {shape.family}, as in peft: choose LORA"
            )
        modules = super().modules(shape)
        self.check_patterns(modules)
        return modules

    @property
    def rank(self) -> int:
        """See `LowRankSpec.rank`."""
        return self.r**2

    @classmethod
    def of_rank(cls, rank: int, **fields: Any) -> AdapterSpec:
        """See `LowRankSpec.of_rank`."""
        return super().of_rank(max(1, math.isqrt(rank)), **fields)

    def rank_of(self, module: Module) -> int:
        """See `LowRankSpec.rank_of`."""
        return self._r_of(module) ** 2

    def scale_of(self, module: Module) -> float:
        """See `LowRankSpec.scale_of`."""
        return value_of(self.alpha_pattern, module.path, self.alpha) / self._r_of(module)

    def _r_of(self, module: Module) -> int:
        return value_of(self.rank_pattern, module.path, self.r)

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`."""
        rank, layer = self._r_of(module), module.layer
        inputs, outputs = (None, 0) if module.column_parallel else (1, None)
        a = AdapterTensor((module.out_features, rank), layer, uniform, outputs)
        b = AdapterTensor((rank, module.in_features), layer, uniform, inputs)
        no_change = AdapterTensor(b.shape, layer, constant(0.0), inputs)
        return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a, "hada_w2_b": no_change}

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`: that of low-rank terms, and the products of factors."""
        return super().work(place)._replace(weights=2 * self.rank * (place.in_features + place.out_features))


KIND = LohaSpec
