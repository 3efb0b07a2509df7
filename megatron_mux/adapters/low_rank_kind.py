"""Kinds whose adapters are low-rank products. Those of LoRA and VeRA are computed with the BaseOp's own product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator
from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Curve, Work
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.kind import AdapterSpec, Sample
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import TUNER_FIELDS, PeftField
from megatron_mux.adapters.selection import Layers, LayersPattern, check_matched
from megatron_mux.adapters.vocabulary_fields import SavesModules
from megatron_mux.base_ops import EXPERT_OPS, BaseOpName
from megatron_mux.kernels.dropout import key_of
from megatron_mux.kernels.low_rank.terms import Term
from megatron_mux.section import problem
from megatron_mux.shape import Module

LOW_RANK_FIELDS: Mapping[str, PeftField] = {
    **TUNER_FIELDS,
    "bias": PeftField(
        "only none is supported: the backbone is frozen, its biases too", ("none",), default="none"
    ),
}
"""Fields of peft's config classes for both LoRA and VeRA."""


class LowRankSpec(SavesModules, AdapterSpec):
    """A kind that adds a low-rank product for each module that it targets."""

    dropout_field: ClassVar[str | None] = None
    """The field with the dropout on the product's input, if the kind has it."""
    sample_ranks: ClassVar[tuple[int, int]]
    """Ranks, of all modules of a BaseOp together, whose seconds are measured."""

    layers_to_transform: Layers = None
    """Indices of the layers that get an adapter, or one of them; None: all. Names in `target_modules` only."""
    layers_pattern: LayersPattern = None
    """Name of the list of layers, such as `layers`, or several; None: any."""

    if TYPE_CHECKING:  # each kind has its own default
        r: int
        target_modules: list[str] | str | None

    @model_validator(mode="after")
    def _layers_are_of_names(self) -> LowRankSpec:
        layers, pattern = (
            self.layers_to_transform not in (None, []),
            self.layers_pattern not in (None, [], ""),
        )
        if layers and isinstance(self.target_modules, str):
            raise problem("layers_to_transform needs a list of names in target_modules, as in peft")
        if pattern and not layers:
            raise problem("layers_pattern needs layers_to_transform, as in peft")
        return self

    def check_patterns(self, modules: Sequence[Module]) -> None:
        """Refuse keys of `rank_pattern` and `alpha_pattern` that match none of the modules, as peft does not.

        A stored adapter may have such keys.

        Raises:
            UserError: There are some.
        """
        for name in ("rank_pattern", "alpha_pattern") if self.adapter_name_or_path is None else ():
            check_matched(name, getattr(self, name), modules)

    @property
    def rank(self) -> int:
        """Rank of the product of a module, if nothing is said of that one; `work` follows from it."""
        return self.r

    def rank_of(self, module: Module) -> int:
        """Rank of the product of a module."""
        return self.rank

    def scale_of(self, module: Module) -> float:
        """Factor of the product of a module."""
        return 1.0

    def latent(self, modules: Sequence[Module]) -> int:
        """Columns that the products of some modules of a BaseOp have in the latent tensor."""
        return sum(self.rank_of(module) for module in modules)

    @property
    def dropout(self) -> float:
        """Dropout on the product's input while training."""
        return float(getattr(self, self.dropout_field)) if self.dropout_field else 0.0

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`: the rank is shared out among the modules of a BaseOp."""

        def section(rank: int, dropout: float) -> Callable[[BaseOpName, Sequence[str]], AdapterSpec]:
            def make(op: BaseOpName, names: Sequence[str]) -> AdapterSpec:
                fields: dict[str, Any] = {cls.dropout_field: dropout} if cls.dropout_field else {}
                by_parameters = op in EXPERT_OPS and "target_parameters" in cls.model_fields
                targets = "target_parameters" if by_parameters else "target_modules"
                return cls.of_rank(max(1, rank // len(names)), **{targets: list(names)}, **fields)

            return make

        return [
            Sample(section(rank, dropout), paired=rank == cls.sample_ranks[0])
            for dropout in ((0.0, 0.1) if cls.dropout_field else (0.0,))
            for rank in cls.sample_ranks
        ]

    @classmethod
    def of_rank(cls, rank: int, **fields: Any) -> AdapterSpec:
        """The section whose `rank` is this, or nearly."""
        return cls(peft_type=cls.kind(), r=rank, **fields)

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve(f"{self.peft_type}_DROPOUT" if self.dropout else self.peft_type, self.rank * modules)

    def curve_of(self, modules: Sequence[Module]) -> Curve:
        """See `AdapterSpec.curve_of`."""
        return self.curve(len(modules))._replace(size=self.latent(modules))

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`."""
        rank, inputs, outputs = self.rank, place.in_features, place.out_features
        return Work(2 * rank * (inputs + outputs), (4 if self.dropout else 1) * inputs + 2 * outputs)


@dataclass(frozen=True)
class Product:
    """The low-rank product of one module.

    Attributes:
        down: `[R, K]` A on this rank: trained, or fixed in the compute dtype.
        up: `[n, R]` B on this rank, likewise.
        subtracted: Fixed A and B, in the compute dtype, whose product goes away; without dropout.
        factors: d `[R]` and b `[n]`, trained where A and B are fixed.
    """

    site: Site
    down: AdapterParameter | Tensor
    up: AdapterParameter | Tensor
    scale: float = 1.0
    subtracted: tuple[Tensor, Tensor] | None = None
    factors: tuple[AdapterParameter, AdapterParameter] | None = None


class LowRankTerms(Adapter):
    """The products of one task at one BaseOp."""

    stages = frozenset({"low_rank"})

    def __init__(self, owner: TaskAdapter, products: Sequence[Product]) -> None:
        self.owner = owner
        self.products = products

    def low_rank(self, slot: int) -> list[Term]:
        """See `Adapter.low_rank`."""
        terms = [self._term(product, slot) for product in self.products]
        return [*terms, *(self._subtracted(product, slot) for product in self.products if product.subtracted)]

    def _term(self, product: Product, slot: int) -> Term:
        owner, site = self.owner, product.site
        spec: Any = owner.spec
        (down, down_gradient), (up, up_gradient) = self._matrix(product.down), self._matrix(product.up)
        d, b = product.factors or (None, None)
        return Term(
            slot,
            down,
            up,
            product.scale,
            owner.host.columns(site),
            down_gradient,
            up_gradient,
            None if d is None else d.value.detach(),
            None if b is None else b.value.detach(),
            None if d is None else d.value.grad,
            None if b is None else b.value.grad,
            spec.dropout,
            key_of(owner.seed, spec.dropout_field, site.path) if spec.dropout else 0,
            site.info.inputs.start,
            known_place=owner.host.place(site),
        )

    def _subtracted(self, product: Product, slot: int) -> Term:
        assert product.subtracted is not None
        site, host = product.site, self.owner.host
        columns, place = host.columns(site), host.place(site)
        return Term(slot, *product.subtracted, -product.scale, columns, known_place=place)

    def _matrix(self, matrix: AdapterParameter | Tensor) -> tuple[Tensor, Tensor | None]:
        """A matrix in the compute dtype, and where its gradient goes."""
        if isinstance(matrix, Tensor):
            return matrix, None
        return self.owner.flat_params.copy_of(matrix), matrix.value.grad
