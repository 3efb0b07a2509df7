"""LoRA (Hu et al., 2021; rank-stabilised: Kalajdzievski, 2023), as in peft.

`y += scale * dropout(x) A^T B^T`. On a column-parallel BaseOp B is divided as the output is and A is whole on every
rank; on a row-parallel one A is divided as the input is and B is whole. What is whole has a partial gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, LowRankTerm, TaskAdapter, tensor_key, uniform, zeros
from megatron_mux.adapters.costs import Curve, Kept, Place, Sample, Work, low_rank_kept, low_rank_work
from megatron_mux.adapters.host import Host, Site
from megatron_mux.adapters.kind import TUNER_FIELDS, AdapterSpec, AdapterTensor, bookkeeping, not_yet
from megatron_mux.adapters.modules import Module, Shape
from megatron_mux.adapters.peft_config import stored_config, stored_targets
from megatron_mux.base_ops import BaseOpName
from megatron_mux.layout import MicroBatch
from megatron_mux.section import LARGEST_SIZE, Number, Refused, Targets, TidyNumber

# Fields of peft's LoraConfig that we leave at their defaults.
_DEFAULTS: Mapping[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "qalora_group_size": 16,
    "rank_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}


class LoraSpec(AdapterSpec):
    """LoRA (`peft.LoraConfig`)."""

    peft_type: Literal["LORA"]
    """The method."""
    r: int = Field(default=8, ge=1, le=LARGEST_SIZE)
    """Rank."""
    lora_alpha: TidyNumber = Field(default=8, gt=0)
    """The update is scaled by `lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
    lora_dropout: Number = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while training."""
    use_rslora: bool = False
    """Scale by the square root of the rank (rank-stabilised LoRA)."""
    target_modules: Targets = None
    """Modules that get an adapter; None: the ones peft would choose for the backbone's family."""

    free_with_weights: ClassVar[frozenset[str]] = frozenset({"lora_dropout"})
    decisive: ClassVar[frozenset[str]] = frozenset({"r", "lora_alpha", "use_rslora"})
    from_weights: ClassVar[frozenset[str]] = frozenset({"megatron_core", "qalora_group_size"})
    initial_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "init_lora_weights": (True, False, "gaussian", "orthogonal")
    }
    refused: ClassVar[Mapping[str, Refused]] = {
        **TUNER_FIELDS,
        **not_yet(
            "use_dora", "use_qalora", "lora_bias", "ensure_weight_tying", "layers_to_transform", "layer_replication",
            "megatron_config", "trainable_token_indices", "eva_config", "corda_config", "lora_ga_config",
            "velora_config", "alora_invocation_tokens", "monteclora_config", "use_bdlora", "arrow_config",
            "kasa_config",
        ),
        **not_yet("rank_pattern", "alpha_pattern", "loftq_config", neutral=(None, {})),
        **not_yet("layers_pattern", "target_parameters", neutral=(None, [])),
        **not_yet("runtime_config", neutral=(None, {}, {"ephemeral_gpu_offload": False})),
        **bookkeeping("megatron_core", "qalora_group_size"),
        "bias": Refused("only none is supported: the backbone is frozen, its biases too", ("none",)),
        "init_lora_weights": Refused("only true (peft's default) is supported yet: leave it out", (True,)),
    }  # fmt: skip

    @property
    def scale(self) -> float:
        """Factor of the low-rank product."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def default_targets(self, shape: Shape) -> list[str]:
        """See `AdapterSpec.default_targets`."""
        return list(shape.default_targets.lora)

    def tensors(self, shape: Shape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.tensors`."""
        found: dict[str, AdapterTensor] = {}
        for module in self.modules(shape):
            column = module.column_parallel
            down, up = (self.r, module.in_features), (module.out_features, self.r)
            found[_a(module.path)] = AdapterTensor(down, module.layer, None if column else 1)
            found[_b(module.path)] = AdapterTensor(up, module.layer, 0 if column else None)
        return found

    def config(self, shape: Shape) -> dict[str, Any]:
        """See `AdapterSpec.config`."""
        own = {name: getattr(self, name) for name in ("r", "lora_alpha", "lora_dropout", "use_rslora")}
        own |= {
            "fan_in_fan_out": shape.transposed,
            "target_modules": stored_targets(self, shape),
        }
        return stored_config(self, {**_DEFAULTS, **own})

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`: the rank is shared out among the modules of a BaseOp."""

        def section(rank: int, dropout: float) -> Callable[[BaseOpName, Sequence[str]], AdapterSpec]:
            return lambda op, names: cls(
                peft_type="LORA",
                r=max(1, rank // len(names)),
                lora_dropout=dropout,
                target_modules=list(names),
            )

        return [
            Sample(section(rank, dropout), pair="linear_qkv" if rank == 8 else None)
            for dropout in (0.0, 0.1)
            for rank in (8, 64)
        ]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve("LORA_DROPOUT" if self.lora_dropout else "LORA", self.r * modules)

    def work(self, place: Place) -> Work:
        """See `AdapterSpec.work`."""
        return low_rank_work(place, self.r * place.modules, bool(self.lora_dropout))

    def kept(self, place: Place, modules: Sequence[Module], shape: Shape) -> Kept:
        """See `AdapterSpec.kept`."""
        return low_rank_kept(place, self.r * place.modules, bool(self.lora_dropout))

    def attach(
        self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None
    ) -> TaskAdapter:
        """See `AdapterSpec.attach`."""
        return Lora(host, task, total_steps, initial)


class Lora(TaskAdapter):
    """LoRA of one task."""

    spec: LoraSpec

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        for op, sites in self.host.sites(self.spec.modules(self.host.shape)):
            self.at[op] = _LoraTerms(self, [self._term(site) for site in sites])

    def _term(self, site: Site) -> _Term:
        down = self.parameter(_a(site.path), uniform, site, partial=True)
        up = self.parameter(_b(site.path), zeros, site, partial=True)
        return _Term(site, down, up)


class _Term:
    """A and B of one module."""

    def __init__(self, site: Site, down: nn.Parameter, up: nn.Parameter) -> None:
        self.path = site.path
        self.features = (site.info.in_start, site.info.in_stop)
        columns = site.columns
        self.columns = None if columns is None else columns.to(down.device)
        self.down = down
        self.up = up


class _LoraTerms(Adapter):
    """The LoRA terms of one task at one BaseOp."""

    stages = frozenset({"low_rank"})

    def __init__(self, owner: Lora, terms: list[_Term]) -> None:
        self.owner = owner
        self.terms = terms

    def low_rank(self, batch: MicroBatch, rows: tuple[int, int]) -> list[LowRankTerm]:
        """See `Adapter.low_rank`."""
        owner, probability = self.owner, self.owner.spec.lora_dropout
        return [
            LowRankTerm(
                t.down,
                t.up,
                t.columns,
                owner.spec.scale,
                owner.input_mask("lora_dropout", t.path, t.features, probability, batch),
                1.0 / (1.0 - probability),
            )
            for t in self.terms
        ]


def _a(path: str) -> str:
    return tensor_key(path, "lora_A.weight")


def _b(path: str) -> str:
    return tensor_key(path, "lora_B.weight")


KIND = LoraSpec
