"""Kinds whose adapters are low-rank products, fused into the BaseOp's: what LoRA and VeRA share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, LowRankTerm, TaskAdapter
from megatron_mux.adapters.attach import Site
from megatron_mux.adapters.costs import Curve, Kept, Place, Row, Sample, Where, Work
from megatron_mux.adapters.kind import AdapterSpec
from megatron_mux.adapters.peft_fields import TUNER_FIELDS, PeftField, not_yet
from megatron_mux.base_ops import BaseOpName
from megatron_mux.kernels.dropout import keep_mask, key_of
from megatron_mux.layout import MicroBatch
from megatron_mux.shape import BackboneShape, Module

LOW_RANK_FIELDS: Mapping[str, PeftField] = {
    **TUNER_FIELDS,
    **not_yet(None, "layers_to_transform"),
    **not_yet(None, "layers_pattern", neutral=(None, [])),
    "bias": PeftField(
        "only none is supported: the backbone is frozen, its biases too", ("none",), default="none"
    ),
}
"""Fields of peft's config classes for both LoRA and VeRA."""


class LowRankSpec(AdapterSpec):
    """A kind that adds a low-rank product for each module that it targets."""

    dropout_field: ClassVar[str | None] = None
    """The field with the dropout on the product's input, if the kind has it."""
    sample_ranks: ClassVar[tuple[int, int]]
    """Ranks, of all modules of a BaseOp together, whose seconds are measured."""

    if TYPE_CHECKING:  # each kind has its own default
        r: int

    @property
    def rank(self) -> int:
        """Rank of the product of one module; every figure of `work` and `kept` follows from it."""
        return self.r

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return 1.0

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
                return cls.of_rank(max(1, rank // len(names)), target_modules=list(names), **fields)

            return make

        return [
            Sample(section(rank, dropout), pair="linear_qkv" if rank == cls.sample_ranks[0] else None)
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

    def work(self, place: Place) -> Work:
        """See `AdapterSpec.work`."""
        rank, inputs, outputs = self.rank * place.modules, place.in_features, place.out_features
        return Work(2 * rank * (inputs + outputs), (4 if self.dropout else 1) * inputs + 2 * outputs)

    def kept(self, place: Place, modules: Sequence[Module], shape: BackboneShape) -> Kept:
        """See `AdapterSpec.kept`."""
        rank = self.rank * place.modules
        rows = [Row("low-rank product", "all", rank)]
        if self.dropout:
            inside: Where = "all" if place.column_parallel else "columns"
            rows.append(Row("dropout masks", inside, place.in_features * place.modules, 1))
        inputs, outputs = rank * place.in_features, rank * place.out_features
        divided, whole = (outputs, inputs) if place.column_parallel else (inputs, outputs)
        return Kept(input=True, rows=tuple(rows), divided=divided, whole=whole)


@dataclass
class Term:
    """The product of one module.

    Attributes:
        site: The module.
        down: `[R, K]` A on this rank.
        up: `[n, R]` B on this rank.
        down_factors: `[R]` factors on the rows of A, if any.
        up_factors: `[n]` factors on the rows of B, if any.
    """

    site: Site
    down: Tensor
    up: Tensor
    down_factors: Tensor | None = None
    up_factors: Tensor | None = None

    def __post_init__(self) -> None:
        self.columns = self.site.columns(self.down.device)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B as they are multiplied."""
        if self.down_factors is None or self.up_factors is None:
            return self.down, self.up
        return self.down_factors[:, None] * self.down, self.up_factors[:, None] * self.up


class LowRankTerms(Adapter):
    """The products of one task at one BaseOp.

    Args:
        owner: The task's adapter.
        terms: Of its modules in the BaseOp.
    """

    stages = frozenset({"low_rank"})

    def __init__(self, owner: TaskAdapter, terms: Sequence[Term]) -> None:
        self.owner = owner
        self.terms = terms

    def low_rank(self, batch: MicroBatch, rows: tuple[int, int]) -> list[LowRankTerm]:
        """See `Adapter.low_rank`."""
        spec: Any = self.owner.spec
        return [
            LowRankTerm(
                *t.matrices(),
                t.columns,
                spec.scale,
                self._input_mask(t.site, batch),
                1.0 / (1.0 - spec.dropout),
            )
            for t in self.terms
        ]

    def _input_mask(self, site: Site, batch: MicroBatch) -> Tensor | None:
        """`[n, K]` bool of the entries of a module's input that dropout keeps; None without dropout."""
        owner, spec = self.owner, self.owner.spec
        if not spec.dropout or not batch.training:
            return None
        start, stop = batch.task_rows[owner.name]
        return keep_mask(
            key_of(owner.seed, spec.dropout_field, site.path),
            batch.task_steps[owner.name],
            batch.sequence_ids[start:stop],
            batch.token_index[start:stop],
            (site.info.inputs.start, site.info.inputs.stop),
            spec.dropout,
        )
