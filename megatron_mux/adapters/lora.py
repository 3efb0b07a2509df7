"""LoRA (Hu et al., 2021; rank-stabilised: Kalajdzievski, 2023), as in peft, and what its config makes of it.

`y += scale * dropout(x) A^T B^T`. On a column-parallel BaseOp B is divided as the output is and A is whole on every
rank; on a row-parallel one A is divided as the input is and B is whole. What is whole has a partial gradient.
`dora.py` holds `use_dora`, `initial_values.py` the values of `init_lora_weights`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import Tensor

from megatron_mux.adapters import initial_values as initial
from megatron_mux.adapters.adapter import Adapter, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Curve, Work
from megatron_mux.adapters.dora import DoraTerms
from megatron_mux.adapters.expert_op import ExpertTerms
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.initial_values import DOWN, FIRST_DOWN, FIRST_UP, MAGNITUDE, UP
from megatron_mux.adapters.kind import AdapterSpec, Sample
from megatron_mux.adapters.low_rank_kind import LOW_RANK_FIELDS, LowRankSpec, LowRankTerms, Product
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import NOT_STORED, PeftField, bookkeeping, not_yet
from megatron_mux.adapters.selection import Alphas, Ranks, value_of
from megatron_mux.adapters.targets import match_parameters, matches
from megatron_mux.adapters.tensors import AdapterTensor, Init, constant, tensor_key, uniform
from megatron_mux.adapters.vocabulary_fields import SavesTokens
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.section import LARGEST_SIZE, Modules, Number, Targets, TidyNumber, problem, shown
from megatron_mux.shape import BackboneShape, Module


class Lora(TaskAdapter):
    """LoRA of one task."""

    _module: Module | None = None
    _computed: dict[str, Tensor] | None = None

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> Adapter:
        """See `TaskAdapter.adapt`."""
        self._computed = None
        site, tensors = modules[0]
        if site.module.experts:
            if self.host.parallel.experts.tensor_size > 1:
                raise UserError(
                    "target_parameters: adapters on routed experts need --expert-tensor-parallel-size 1"
                )
            return ExpertTerms(self, site, *tensors)
        products = [self._product(site, tensors) for site, tensors in modules]
        if self.spec.use_dora:
            return DoraTerms(self, products, [tensors[2] for _, tensors in modules])
        return LowRankTerms(self, products)

    def _product(self, site: Site, tensors: Sequence[AdapterParameter]) -> Product:
        down, up, *others = tensors
        subtracted = None
        if self.spec.takes_away:
            first_down, first_up = (p.value.detach().to(self.host.dtype) for p in others[-2:])
            subtracted = first_down, first_up
        return Product(site, down, up, self.spec.scale_of(site.module), subtracted)

    def _tensors_of(self, site: Site) -> list[AdapterParameter]:
        self._module, self._computed = site.module, None
        return super()._tensors_of(site)

    def fresh(self, key: str) -> Tensor:
        """See `TaskAdapter.fresh`: some values are computed, all of a module at once."""
        assert self._module is not None
        name = key.removeprefix(tensor_key(self._module.path, ""))
        if name in self.spec.computed and self._computed is None:
            self._computed = self._compute(self._module)
        value = (self._computed or {}).get(name)
        return super().fresh(key) if value is None else value

    def _compute(self, module: Module) -> dict[str, Tensor]:
        """A module's initial values that depend on its weight or on each other, by the end of their key."""
        spec, method, rank = self.spec, self.spec.init_lora_weights, self.spec.rank_of(module)
        values: dict[str, Tensor] = {}
        if method == "orthogonal":
            values = initial.orthogonal(module, rank, self.seed)
        if not (spec.takes_away or spec.use_dora):
            return values
        if self.host.weights is None:
            raise UserError(
                "use_dora, and init_lora_weights pissa and olora, start from the backbone's weights, which are not "
                "here: start from a saved adapter with adapter_name_or_path"
            )
        weight, scale = self.host.weights(module.path), spec.scale_of(module)
        if weight is None:  # the values do not matter
            return values
        weight = weight.to(self.host.parameter_dtype)
        if spec.takes_away:
            values = initial.factors(method, weight, rank, scale, self.seed, module.path)
        if spec.use_dora:
            factors = values or {
                name: super(Lora, self).fresh(tensor_key(module.path, name)) for name in (DOWN, UP)
            }
            values[MAGNITUDE] = initial.magnitude(weight, scale, factors)
        return values


class LoraSpec(SavesTokens, LowRankSpec):
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
    use_dora: bool = False
    """Rescale each output feature of the adapted weight to a trained magnitude (DoRA)."""
    init_lora_weights: bool | str = True
    """Initial values: true (no change at first), false, `gaussian`, `orthogonal`, or from the backbone's weights
    `pissa`, `pissa_niter_N` (N iterations of a fast approximation) or `olora`; then saves hold plain LoRA of twice the
    rank, as peft converts it."""
    rank_pattern: Ranks = Field(default_factory=dict)
    """Ranks of modules that differ from `r`, by the end of their path or a regular expression for it."""
    alpha_pattern: Alphas = Field(default_factory=dict)
    """Their `lora_alpha`, likewise."""
    target_modules: Targets = None
    """Modules that get an adapter; None: the ones peft would choose for the backbone's family."""
    exclude_modules: Modules = None
    """Modules that get no adapter though `target_modules` names them; text is a regular expression."""

    target_parameters: list[str] | None = None
    """Parameters that hold a layer's routed experts, such as `mlp.experts.gate_up_proj`: each expert gets an adapter of
    its own, of rank `r`. In backbones with experts also weights of modules: `shared_experts.up_proj.weight`."""

    run_time = Lora
    dropout_field = "lora_dropout"
    sample_ranks = (8, 64)
    free_with_weights = frozenset({"lora_dropout"})
    refused: ClassVar[Mapping[str, PeftField]] = {
        **LOW_RANK_FIELDS,
        **not_yet(False, "use_qalora", "lora_bias"),
        **not_yet(
            None, "layer_replication", "megatron_config",
            "eva_config", "corda_config", "lora_ga_config", "velora_config", "alora_invocation_tokens",
            "monteclora_config", "use_bdlora", "arrow_config", "kasa_config",
        ),
        **not_yet({}, "loftq_config", neutral=(None, {})),
        **not_yet(NOT_STORED, "runtime_config", neutral=(None, {}, {"ephemeral_gpu_offload": False})),
        **bookkeeping(megatron_core="megatron.core", qalora_group_size=16),
    }  # fmt: skip

    @field_validator("init_lora_weights", mode="plain")
    @classmethod
    def _init_is_supported(cls, value: Any) -> bool | str:
        if not initial.is_known(value):
            raise problem(
                f"{shown(value)} is not supported: choose true, false, gaussian, orthogonal, pissa, pissa_niter_N or "
                "olora"
            )
        return value  # type: ignore[no-any-return]

    @property
    def begins_as_backbone(self) -> bool:
        """See `AdapterSpec.begins_as_backbone`: B is zero, and nothing is rescaled."""
        drawn = self.init_lora_weights is True or self.init_lora_weights == "gaussian"
        return drawn and self.adapter_name_or_path is None and not self.use_dora

    @property
    def takes_away(self) -> bool:
        """Whether the initial product is subtracted."""
        return initial.takes_away(self.init_lora_weights)

    @property
    def computed(self) -> frozenset[str]:
        """Ends of the keys of tensors whose initial values are computed, not drawn one by one."""
        names = {DOWN, UP, FIRST_DOWN, FIRST_UP} if self.takes_away else set()
        names |= {DOWN, UP} if self.init_lora_weights == "orthogonal" else set()
        return frozenset(names | ({MAGNITUDE} if self.use_dora else set()))

    def rank_of(self, module: Module) -> int:
        """See `LowRankSpec.rank_of`."""
        return value_of(self.rank_pattern, module.path, self.r)

    def scale_of(self, module: Module) -> float:
        """See `LowRankSpec.scale_of`."""
        rank, alpha = self.rank_of(module), value_of(self.alpha_pattern, module.path, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def latent(self, modules: Sequence[Module]) -> int:
        """See `LowRankSpec.latent`."""
        return super().latent(modules) * (2 if self.takes_away else 1)

    def modules(self, shape: BackboneShape) -> list[Module]:
        """See `AdapterSpec.modules`; routed experts are named by `target_parameters`."""
        modules = super().modules(shape)
        parameters = match_parameters(self.target_parameters or (), shape.modules)
        if parameters or self._left_out_by_peft(modules, shape):
            self._refuse_with_parameters()
        wanted = {module.path for module in (*modules, *parameters)}
        modules = [module for module in shape.modules if module.path in wanted]
        for module in modules:
            initial.check_rank(self.init_lora_weights, self.rank_of(module), module, shape)
        self.check_patterns(modules)
        return modules

    def _refuse_with_parameters(self) -> None:
        """Refuse what peft cannot have where it adapts parameters, not modules."""
        refused = {"lora_dropout": self.lora_dropout > 0, "use_dora": self.use_dora}
        refused["init_lora_weights"] = self.takes_away or self.init_lora_weights == "orthogonal"
        for name in (name for name, is_set in refused.items() if is_set):
            raise UserError(
                f"{name}: must be {'0' if name == 'lora_dropout' else 'its default'} with target_parameters, and with "
                "MLPs and shared experts of a backbone with routed experts, as in peft: leave it out, or name modules "
                "of attention only"
            )

    @staticmethod
    def _left_out_by_peft(modules: Sequence[Module], shape: BackboneShape) -> list[Module]:
        """Those of the modules that peft leaves out, without a word, unless `target_parameters` names their weights."""
        if shape.experts is None:
            return []
        return [m for m in modules if m.op not in shape.attention_ops and not m.experts]

    def config(self, shape: BackboneShape) -> dict[str, Any]:
        """See `AdapterSpec.config`: modules that peft must be told of as parameters are named so."""
        config, named = super().config(shape), super().modules(shape)
        if self.takes_away:
            config |= self._joined_fields()
        left_out = self._left_out_by_peft(named, shape)
        if left_out:
            config["target_modules"] = [module.path for module in named if module not in left_out]
            config["target_parameters"] = [
                *(self.target_parameters or ()), *(f"{module.path}.weight" for module in left_out)
            ]  # fmt: skip
        return config

    def _joined_fields(self) -> dict[str, Any]:
        """Fields of plain LoRA of twice the rank and the same scale."""

        def scaled(alpha: float) -> float:
            return alpha * math.sqrt(2) if self.use_rslora else 2 * alpha

        return {
            "init_lora_weights": True,
            "r": 2 * self.r,
            "lora_alpha": scaled(self.lora_alpha),
            "rank_pattern": {name: 2 * rank for name, rank in self.rank_pattern.items()},
            "alpha_pattern": {name: scaled(alpha) for name, alpha in self.alpha_pattern.items()},
        }

    def in_files(self, tensors: Mapping[str, Tensor], shape: BackboneShape) -> dict[str, Tensor]:
        """See `AdapterSpec.in_files`: with a subtracted product, plain LoRA of twice the rank."""
        return self._converted(tensors, shape, lambda tensors_, module: initial.joined(tensors_))

    def from_files(self, tensors: Mapping[str, Tensor], shape: BackboneShape) -> dict[str, Tensor]:
        """See `AdapterSpec.from_files`."""
        return self._converted(tensors, shape, self._parted)

    def _parted(self, tensors: dict[str, Tensor], module: Module) -> dict[str, Tensor]:
        parts = initial.parted(tensors, self.rank_of(module))
        if FIRST_DOWN not in parts and DOWN in parts and initial.is_random(self.init_lora_weights):
            raise UserError(
                f"init_lora_weights: the initial values of {self.init_lora_weights} are random, and the adapter to "
                "start from lacks them: save it with path_initial_model_for_weight_conversion, as plain LoRA"
            )
        return parts

    def _converted(
        self,
        tensors: Mapping[str, Tensor],
        shape: BackboneShape,
        convert: Callable[[dict[str, Tensor], Module], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        left = dict(tensors)
        for module in self.modules(shape) if self.takes_away else ():
            prefix = tensor_key(module.path, "")
            names = [name for name in (DOWN, UP, MAGNITUDE, FIRST_DOWN, FIRST_UP) if prefix + name in left]
            converted = convert({name: left.pop(prefix + name) for name in names}, module)
            left |= {prefix + name: tensor for name, tensor in converted.items()}
        return left

    def key_path(self, module: Module) -> str:
        """See `AdapterSpec.key_path`: peft wraps the module that holds the parameters, once for each of them."""
        if not module.experts:
            return module.path
        parent, _, name = module.path.rpartition(".")
        outer = f"{parent}.down_proj"
        both = name != "down_proj" and any(matches(target, outer) for target in self.target_parameters or ())
        return f"{parent}.base_layer" if both else parent

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`."""
        rank, layer = self.rank_of(module), module.layer
        down, up = self._drawn(rank)
        if module.experts:
            assert shape.experts is not None
            rows = shape.experts.count * rank
            return {
                DOWN: AdapterTensor((rows, module.in_features), layer, down, expert_dim=0),
                UP: AdapterTensor((module.out_features, rows), layer, up, expert_dim=1),
            }
        inputs, outputs = (None, 0) if module.column_parallel else (1, None)
        sizes = (rank, module.in_features), (module.out_features, rank)
        tensors = {
            DOWN: AdapterTensor(sizes[0], layer, down, inputs),
            UP: AdapterTensor(sizes[1], layer, up, outputs),
        }
        if self.use_dora:
            tensors[MAGNITUDE] = AdapterTensor(sizes[1][:1], layer, constant(1.0), outputs)
        if self.takes_away:
            fixed: dict[str, Any] = {"trained": False, "derived": True}
            tensors[FIRST_DOWN] = AdapterTensor(sizes[0], layer, constant(0.0), inputs, **fixed)
            tensors[FIRST_UP] = AdapterTensor(sizes[1], layer, constant(0.0), outputs, **fixed)
        return tensors

    def _drawn(self, rank: int) -> tuple[Init, Init]:
        """What A and B are drawn from."""
        if self.init_lora_weights is False:
            return uniform, uniform  # as `torch.nn.Linear` leaves them
        if self.init_lora_weights == "gaussian":
            return (lambda full, generator: full.normal_(std=1 / rank, generator=generator)), constant(0.0)
        return uniform, constant(0.0)

    # -- its cost

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`: DoRA has seconds of its own."""
        plain = super().samples()
        return [*plain, *(Sample(partial(_dora, sample), sample.paired) for sample in plain)]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        curve = super().curve(modules)
        return curve._replace(name=curve.name.replace("LORA", "LORA_DORA")) if self.use_dora else curve

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`: DoRA reads the weight and its own product; with dropout it has a second product."""
        work = super().work(place)
        if not self.use_dora:
            return work
        elements = place.in_features * place.out_features
        again = 2 * elements if self.dropout else 0
        return Work(work.flops + again, work.moved + 3 * place.out_features, elements)


def _dora(sample: Sample, op: BaseOpName, names: Sequence[str]) -> AdapterSpec:
    """A sample's section with `use_dora`."""
    return sample.section(op, names).model_copy(update={"use_dora": True})


KIND = LoraSpec
