"""VeRA (Kopiczko et al., 2024), as in peft: one pair of fixed random matrices, and two trained vectors per module.

`y += b * (B (d * (A dropout(x))))`: the vectors `d` and `b` of a module scale the rows of A and of B, of which it uses
as many columns and rows as it is wide. That is the low-rank product of `diag(d) A` and `diag(b) B`, so VeRA is computed
together with all other low-rank terms. On a column-parallel BaseOp B and `b` are divided as the output is; on a
row-parallel one A is divided as the input is. What is whole has a partial gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Work
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.low_rank_kind import LOW_RANK_FIELDS, LowRankSpec, LowRankTerms, Product
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import NOT_STORED, PeftField, initial_values, not_yet
from megatron_mux.adapters.tensors import AdapterTensor, constant
from megatron_mux.section import LARGEST_SIZE, Number, Targets
from megatron_mux.shape import BackboneShape, Module

_A, _B = "base_model.vera_A", "base_model.vera_B"


class Vera(TaskAdapter):
    """VeRA of one task."""

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        modules = self.spec.modules(self.host.shape)
        if list(self.host.sites(modules)):
            # Several stages have them, one saves them.
            owner = modules[0].layer in self.host.layers
            self.a, self.b = (self.make(key, owner=owner).value for key in (_A, _B))
        # The parts of A and B that modules use, in the compute dtype: layers share them.
        self._downs: dict[range, Tensor] = {}
        self._ups: dict[tuple[str, str], Tensor] = {}
        super().build()

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> LowRankTerms:
        """See `TaskAdapter.adapt`."""
        return LowRankTerms(self, [self._product(site, b, d) for site, (b, d) in modules])

    def _product(self, site: Site, b: AdapterParameter, d: AdapterParameter) -> Product:
        info, part, dtype = site.info, site.part, self.host.dtype
        if info.inputs not in self._downs:
            columns = slice(info.inputs.start, info.inputs.stop)
            self._downs[info.inputs] = self.a.detach()[:, columns].to(dtype).contiguous()
        name = (info.name, site.path.removeprefix(info.hf_prefix))
        if name not in self._ups:
            rows = part.features if info.column_parallel else torch.arange(part.out_features)
            self._ups[name] = _rows_of(self.b.detach(), rows).to(dtype)
        return Product(site, self._downs[info.inputs], self._ups[name], factors=(d, b))


class VeraSpec(LowRankSpec):
    """VeRA (`peft.VeraConfig`)."""

    peft_type: Literal["VERA"]
    """The method."""
    r: int = Field(default=256, ge=1, le=LARGEST_SIZE)
    """Rank of the random matrices."""
    projection_prng_key: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the random matrices."""
    save_projection: bool = True
    """Whether the random matrices are saved with the adapter, or drawn again from the seed when it is loaded."""
    vera_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    d_initial: Number = 0.1
    """Initial value of the vector between the two matrices."""
    target_modules: Targets = None
    """Modules that get an adapter; None: the ones peft would choose for the backbone's family."""

    run_time = Vera
    dropout_field = "vera_dropout"
    sample_ranks = (32, 256)
    free_with_weights = frozenset({"vera_dropout", "d_initial"})
    refused: ClassVar[Mapping[str, PeftField]] = {
        **LOW_RANK_FIELDS,
        **not_yet(NOT_STORED, "exclude_modules", neutral=(None, [])),
        **initial_values("init_weights"),
    }

    def shared_tensors(self, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.shared_tensors`: A and B, as wide as the widest input and output of all modules."""
        modules = self.modules(shape)
        inputs, outputs = (max(getattr(m, side) for m in modules) for side in ("in_features", "out_features"))
        a, b = (self.r, inputs), (outputs, self.r)
        stored = self.save_projection
        return {
            _A: AdapterTensor(a, None, lambda full, _: self._draw(full), trained=False, stored=stored),
            _B: AdapterTensor(b, None, lambda full, _: self._draw(full, a), trained=False, stored=stored),
        }

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`."""
        dim = 0 if module.column_parallel else None
        return {
            "vera_lambda_b": AdapterTensor((module.out_features,), module.layer, constant(0.0), dim),
            "vera_lambda_d": AdapterTensor((self.r,), module.layer, constant(self.d_initial)),
        }

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`: that of low-rank terms, and the scaling of the matrices."""
        matrices = self.r * (place.in_features + place.out_features)
        return super().work(place)._replace(weights=3 * matrices)

    def _draw(self, full: Tensor, *before: tuple[int, int]) -> None:
        """Fill a matrix exactly as peft draws it: after those `before`, from one generator, Kaiming uniform."""
        generator = torch.Generator().manual_seed(self.projection_prng_key)
        for matrix in (*(full.new_empty(shape) for shape in before), full):
            bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(matrix.shape[1]))
            matrix.uniform_(-bound, bound, generator=generator)


def _rows_of(matrix: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a matrix: a view if they are neighbours."""
    if rows.numel() and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + rows.numel())):
        return matrix[int(rows[0]) : int(rows[0]) + rows.numel()]
    return matrix[rows.to(matrix.device)]


KIND = VeraSpec
