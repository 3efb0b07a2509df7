"""LoRA (Hu et al., 2021; rank-stabilised: Kalajdzievski, 2023), as in peft.

`y += scale * dropout(x) A^T B^T`. On a column-parallel BaseOp B is divided as the output is and A is whole on every
rank; on a row-parallel one A is divided as the input is and B is whole. What is whole has a partial gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from megatron_mux.adapters.adapter import Adapter, AdapterParameter, TaskAdapter
from megatron_mux.adapters.attach import Site
from megatron_mux.adapters.expert_op import ExpertTerms
from megatron_mux.adapters.kind import AdapterTensor, constant, uniform
from megatron_mux.adapters.low_rank_kind import LOW_RANK_FIELDS, LowRankSpec, LowRankTerms, Product
from megatron_mux.adapters.peft_fields import NOT_STORED, PeftField, bookkeeping, not_yet
from megatron_mux.adapters.targets import match_parameters, matches
from megatron_mux.adapters.vocabulary_fields import SavesTokens
from megatron_mux.errors import UserError
from megatron_mux.section import LARGEST_SIZE, Number, Targets, TidyNumber
from megatron_mux.shape import BackboneShape, Module


class Lora(TaskAdapter):
    """LoRA of one task."""

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> Adapter:
        """See `TaskAdapter.adapt`."""
        site, matrices = modules[0]
        if site.module.experts:
            if self.host.parallel.experts.tensor_size > 1:
                raise UserError(
                    "target_parameters: adapters on routed experts need --expert-tensor-parallel-size 1"
                )
            return ExpertTerms(self, site, *matrices)
        return LowRankTerms(self, [Product(site, down, up) for site, (down, up) in modules])


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
    target_modules: Targets = None
    """Modules that get an adapter; None: the ones peft would choose for the backbone's family."""

    target_parameters: list[str] | None = None
    """Parameters that hold a layer's routed experts, such as `mlp.experts.gate_up_proj`: each expert gets an adapter of
    its own, of rank `r`. In backbones with experts also weights of modules: `shared_experts.up_proj.weight`."""

    run_time = Lora
    dropout_field = "lora_dropout"
    sample_ranks = (8, 64)
    free_with_weights = frozenset({"lora_dropout"})
    refused: ClassVar[Mapping[str, PeftField]] = {
        **LOW_RANK_FIELDS,
        **not_yet(None, "exclude_modules", neutral=(None, [])),
        **not_yet(False, "use_dora", "use_qalora", "lora_bias"),
        **not_yet(
            None, "layer_replication", "megatron_config",
            "eva_config", "corda_config", "lora_ga_config", "velora_config", "alora_invocation_tokens",
            "monteclora_config", "use_bdlora", "arrow_config", "kasa_config",
        ),
        **not_yet({}, "rank_pattern", "alpha_pattern", "loftq_config", neutral=(None, {})),
        **not_yet(NOT_STORED, "runtime_config", neutral=(None, {}, {"ephemeral_gpu_offload": False})),
        **bookkeeping(megatron_core="megatron.core", qalora_group_size=16),
        "init_lora_weights": PeftField(
            "only true (peft's default) is supported yet: leave it out", (True,), default=True,
            of_weights=(True, False, "gaussian", "orthogonal"),
        ),
    }  # fmt: skip

    @property
    def scale(self) -> float:
        """Factor of the low-rank product."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    def modules(self, shape: BackboneShape) -> list[Module]:
        """See `AdapterSpec.modules`; routed experts are named by `target_parameters`."""
        found = super().modules(shape)
        parameters = match_parameters(self.target_parameters or (), shape.modules)
        if self.lora_dropout and (parameters or self._beside_experts(found, shape)):
            raise UserError(
                "lora_dropout: must be 0 with target_parameters, and with MLPs and shared experts of a backbone with "
                "routed experts, as in peft: leave it out, or name modules of attention only"
            )
        wanted = {module.path for module in (*found, *parameters)}
        return [module for module in shape.modules if module.path in wanted]

    @staticmethod
    def _beside_experts(modules: Sequence[Module], shape: BackboneShape) -> list[Module]:
        """Those of the modules that peft leaves out, without a word, unless `target_parameters` names their weights."""
        if shape.experts is None:
            return []
        return [m for m in modules if m.op not in shape.attention_ops and not m.experts]

    def config(self, shape: BackboneShape) -> dict[str, Any]:
        """See `AdapterSpec.config`: modules that peft must be told of as parameters are named so."""
        config, named = super().config(shape), super().modules(shape)
        beside = self._beside_experts(named, shape)
        if beside:
            config["target_modules"] = [module.path for module in named if module not in beside]
            config["target_parameters"] = [
                *(self.target_parameters or ()), *(f"{module.path}.weight" for module in beside)
            ]  # fmt: skip
        return config

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
        down, up = (self.r, module.in_features), (module.out_features, self.r)
        if module.experts:
            assert shape.experts is not None
            rows = shape.experts.count * self.r
            return {
                "lora_A.weight": AdapterTensor(
                    (rows, module.in_features), module.layer, uniform, expert_dim=0
                ),
                "lora_B.weight": AdapterTensor(
                    (module.out_features, rows), module.layer, constant(0.0), expert_dim=1
                ),
            }
        column = module.column_parallel
        return {
            "lora_A.weight": AdapterTensor(down, module.layer, uniform, None if column else 1),
            "lora_B.weight": AdapterTensor(up, module.layer, constant(0.0), 0 if column else None),
        }


KIND = LoraSpec
