"""VeRA (Kopiczko et al., 2024), as in peft: one pair of fixed random matrices, and two trained vectors per module.

`y += b * (B (d * (A dropout(x))))`: the vectors `d` and `b` of a module scale the rows of A and of B, of which it uses
as many columns and rows as it is wide. That is the low-rank product of `diag(d) A` and `diag(b) B`, so VeRA is computed
together with all other low-rank terms. On a column-parallel BaseOp B and `b` are divided as the output is; on a
row-parallel one A is divided as the input is. What is whole has a partial gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, LowRankTerm, TaskAdapter, tensor_key, zeros
from megatron_mux.adapters.costs import Curve, Kept, Place, Sample, Work, low_rank_kept, low_rank_work
from megatron_mux.adapters.host import Host, Site
from megatron_mux.adapters.kind import TUNER_FIELDS, AdapterSpec, AdapterTensor, not_yet
from megatron_mux.adapters.modules import Module, Shape
from megatron_mux.adapters.peft_config import stored_config, stored_targets
from megatron_mux.base_ops import BaseOpName
from megatron_mux.layout import MicroBatch
from megatron_mux.section import LARGEST_SIZE, Number, Refused, Targets

_A, _B = "base_model.vera_A", "base_model.vera_B"


class VeraSpec(AdapterSpec):
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

    free_with_weights: ClassVar[frozenset[str]] = frozenset({"vera_dropout", "d_initial"})
    decisive: ClassVar[frozenset[str]] = frozenset({"r", "projection_prng_key", "save_projection"})
    initial_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {"init_weights": (True, False)}
    refused: ClassVar[Mapping[str, Refused]] = {
        **TUNER_FIELDS,
        **not_yet("layers_to_transform"),
        **not_yet("layers_pattern", neutral=(None, [])),
        "bias": Refused("only none is supported: the backbone is frozen, its biases too", ("none",)),
        "init_weights": Refused("only true (peft's default) is supported: leave it out", (True,)),
    }

    def default_targets(self, shape: Shape) -> list[str]:
        """See `AdapterSpec.default_targets`."""
        return list(shape.default_targets.lora)

    def tensors(self, shape: Shape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.tensors`."""
        modules = self.modules(shape)
        found = {
            key: AdapterTensor(size, None, trained=False, stored=self.save_projection)
            for key, size in zip((_A, _B), self._projections(modules), strict=True)
        }
        for module in modules:
            dim = 0 if module.column_parallel else None
            found[_lambda_b(module.path)] = AdapterTensor((module.out_features,), module.layer, dim)
            found[_lambda_d(module.path)] = AdapterTensor((self.r,), module.layer)
        return found

    def config(self, shape: Shape) -> dict[str, Any]:
        """See `AdapterSpec.config`."""
        own = ("r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial")
        return stored_config(
            self,
            {
                **{name: getattr(self, name) for name in own},
                "bias": "none",
                "fan_in_fan_out": shape.transposed,
                "init_weights": True,
                "layers_pattern": None,
                "layers_to_transform": None,
                "modules_to_save": None,
                "target_modules": stored_targets(self, shape),
            },
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`: the rank is shared out among the modules of a BaseOp."""

        def section(rank: int, dropout: float) -> Callable[[BaseOpName, Sequence[str]], AdapterSpec]:
            return lambda op, names: cls(
                peft_type="VERA",
                r=max(1, rank // len(names)),
                vera_dropout=dropout,
                target_modules=list(names),
            )

        return [
            Sample(section(rank, dropout), pair="linear_qkv" if rank == 32 else None)
            for dropout in (0.0, 0.1)
            for rank in (32, 256)
        ]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve("VERA_DROPOUT" if self.vera_dropout else "VERA", self.r * modules)

    def work(self, place: Place) -> Work:
        """See `AdapterSpec.work`: that of low-rank terms, and the scaling of the matrices."""
        rank = self.r * place.modules
        flops, moved, _ = low_rank_work(place, rank, bool(self.vera_dropout))
        return Work(flops, moved, 3 * rank * (place.in_features + place.out_features))

    def kept(self, place: Place, modules: Sequence[Module], shape: Shape) -> Kept:
        """See `AdapterSpec.kept`: that of low-rank terms, whose matrices are made for each micro-batch."""
        return low_rank_kept(place, self.r * place.modules, bool(self.vera_dropout))

    def attach(
        self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None
    ) -> TaskAdapter:
        """See `AdapterSpec.attach`."""
        return Vera(host, task, total_steps, initial)

    def _projections(self, modules: list[Module]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B: as wide as the widest input and output of all modules."""
        inputs, outputs = (max(getattr(m, side) for m in modules) for side in ("in_features", "out_features"))
        return (self.r, inputs), (outputs, self.r)


class Vera(TaskAdapter):
    """VeRA of one task."""

    spec: VeraSpec

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        modules = self.spec.modules(self.host.shape)
        found = list(self.host.sites(modules))
        if not found:
            return
        a, b = self._draw()
        # Several stages have them, one saves them.
        owner = self.host.first_tensor_rank and modules[0].layer in self.host.layers
        self.a = self.make(_A, lambda full, _: full.copy_(a), owner=owner).value
        self.b = self.make(_B, lambda full, _: full.copy_(b), owner=owner).value
        self._parts: dict[tuple[str, str], Tensor] = {}  # rows of B by BaseOp and module: layers share them
        for op, sites in found:
            self.at[op] = _VeraTerms(self, [self._term(site) for site in sites])

    def _draw(self) -> tuple[Tensor, Tensor]:
        """A and B exactly as peft draws them: one after the other from one generator, Kaiming uniform."""
        generator = torch.Generator().manual_seed(self.spec.projection_prng_key)
        a, b = (torch.empty(self.tensors[key].shape, dtype=torch.float32) for key in (_A, _B))
        for full in (a, b):
            bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(full.shape[1]))
            full.uniform_(-bound, bound, generator=generator)
        return a, b

    def _term(self, site: Site) -> _Term:
        b = self.parameter(_lambda_b(site.path), zeros, site, partial=True)
        d = self.parameter(_lambda_d(site.path), self._fill, site, partial=True)
        name = (site.info.name, site.path.removeprefix(site.info.hf_prefix))
        if name not in self._parts:
            rows = site.part.features if site.column_parallel else torch.arange(site.part.out_features)
            self._parts[name] = _rows_of(self.b, rows)
        return _Term(site, self.a[:, site.info.in_start : site.info.in_stop], self._parts[name], d, b)

    def _fill(self, full: Tensor, generator: torch.Generator) -> None:
        full.fill_(self.spec.d_initial)


class _Term:
    """The vectors of one module, and what they scale.

    Args:
        site: The module.
        down: `[R, K]` A on this rank.
        up: `[n, R]` B on this rank.
        d: `[R]` scales the rows of A.
        b: `[n]` scales the rows of B.
    """

    def __init__(self, site: Site, down: Tensor, up: Tensor, d: nn.Parameter, b: nn.Parameter) -> None:
        self.path = site.path
        self.features = (site.info.in_start, site.info.in_stop)
        columns = site.columns
        self.columns = None if columns is None else columns.to(d.device)
        self.down, self.up, self.d, self.b = down, up, d, b


class _VeraTerms(Adapter):
    """The VeRA terms of one task at one BaseOp."""

    stages = frozenset({"low_rank"})

    def __init__(self, owner: Vera, terms: list[_Term]) -> None:
        self.owner = owner
        self.terms = terms

    def low_rank(self, batch: MicroBatch, rows: tuple[int, int]) -> list[LowRankTerm]:
        """See `Adapter.low_rank`."""
        owner, probability = self.owner, self.owner.spec.vera_dropout
        return [
            LowRankTerm(
                t.d[:, None] * t.down,
                t.b[:, None] * t.up,
                t.columns,
                1.0,
                owner.input_mask("vera_dropout", t.path, t.features, probability, batch),
                1.0 / (1.0 - probability),
            )
            for t in self.terms
        ]


def _rows_of(matrix: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a matrix: a view if they are neighbours."""
    if rows.numel() and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + rows.numel())):
        return matrix[int(rows[0]) : int(rows[0]) + rows.numel()]
    return matrix[rows.to(matrix.device)]


def _lambda_b(path: str) -> str:
    return tensor_key(path, "vera_lambda_b")


def _lambda_d(path: str) -> str:
    return tensor_key(path, "vera_lambda_d")


KIND = VeraSpec
