"""IA3 (Liu et al., 2022), as in peft: learned factors on a module's output, bias included, or on its input.

On a row-parallel BaseOp outputs are scaled after the reduction over tensor ranks, inputs where they lie. On a
column-parallel BaseOp outputs are scaled where they lie; a module whose *input* is scaled there is computed anew for
the task's rows, since other modules in the same BaseOp (q beside k, say) read the input as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, Grouped, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Curve, Work
from megatron_mux.adapters.host import Host, Site
from megatron_mux.adapters.kind import AdapterSpec, Sample
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import TUNER_FIELDS, PeftField, initial_values
from megatron_mux.adapters.tensors import AdapterTensor, constant
from megatron_mux.adapters.vocabulary_fields import SavesModules
from megatron_mux.base_ops import BaseOpName
from megatron_mux.batch.packed_batch import PackedBatch
from megatron_mux.kernels.low_rank.columns import Columns
from megatron_mux.kernels.low_rank.terms import Term
from megatron_mux.section import Modules, Targets, problem
from megatron_mux.shape import BackboneShape, Module


class _InputScale(Adapter):
    """Factors on the input of a row-parallel BaseOp."""

    stages = frozenset({"before"})
    grouped = frozenset[Grouped]({"before"})

    def __init__(self, factor: nn.Parameter) -> None:
        self.factor = factor

    def before(self, x: Tensor) -> Tensor:
        """See `Adapter.before`. As in peft, the factors are not rounded to a half-precision backbone's dtype."""
        return (x * self.factor.flatten()).to(x.dtype)

    def row_terms(self, stage: Grouped, slot: int) -> list[Term]:
        """See `Adapter.row_terms`."""
        return [_term(slot, self.factor)]


class _OutputScale(Adapter):
    """Factors on outputs of any BaseOp, and on inputs of modules in a column-parallel one."""

    grouped = frozenset[Grouped]({"after"})

    def __init__(self, host: Host, factors: list[tuple[Site, bool, nn.Parameter]]) -> None:
        self.host = host
        self.sites = [(site, factor) for site, scales_input, factor in factors if not scales_input]
        self.module: Any = factors[0][0].info.module
        self.outputs: list[tuple[Tensor, nn.Parameter]] = []
        self.inputs: list[tuple[Tensor, nn.Parameter]] = []
        for site, scales_input, factor in factors:
            columns = site.part.columns.to(factor.device)
            (self.inputs if scales_input else self.outputs).append((columns, factor))
        self.stages = frozenset({"product"} if self.inputs else set()) | frozenset(
            {"after"} if self.outputs else set()
        )

    def product(self, x: Tensor, y: Tensor, batch: PackedBatch) -> Tensor:
        """See `Adapter.product`: columns whose input is scaled are replaced."""
        bias = None if self.module.skip_bias_add else self.module.bias
        for columns, factor in self.inputs:
            scaled = (x * factor.flatten()).to(x.dtype)
            weight = self.module.weight.index_select(0, columns)
            y = y.index_copy(1, columns, F.linear(scaled, weight, None if bias is None else bias[columns]))
        return y

    def after(self, y: Tensor) -> Tensor:
        """See `Adapter.after`. Columns of other modules are multiplied by one."""
        factors = torch.ones(y.shape[1], dtype=self.outputs[0][1].dtype, device=y.device)
        for columns, factor in self.outputs:
            factors = factors.index_copy(0, columns, factor.flatten())
        return (y * factors).to(y.dtype)

    def row_terms(self, stage: Grouped, slot: int) -> list[Term]:
        """See `Adapter.row_terms`."""
        host = self.host
        return [_term(slot, factor, host.columns(site), host.place(site)) for site, factor in self.sites]


def _term(
    slot: int, factor: nn.Parameter, columns: Tensor | None = None, place: Columns | None = None
) -> Term:
    assert factor.grad is not None
    return Term.of_factors(slot, factor.detach().view(-1), factor.grad.view(-1), columns, place)


class IA3(TaskAdapter):
    """IA3 of one task."""

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> Adapter:
        """See `TaskAdapter.adapt`."""
        shape = self.host.shape
        made = [
            (site, bool(self.spec.scales_input([site.module], shape)), factor.value)
            for site, (factor,) in modules
        ]
        first, scales_input, factor = made[0]
        # A row-parallel BaseOp is one module.
        whole = scales_input and not first.info.column_parallel
        return _InputScale(factor) if whole else _OutputScale(self.host, made)


class IA3Spec(SavesModules, AdapterSpec):
    """IA3 (`peft.IA3Config`): learned scales of outputs, or of inputs for feed-forward modules."""

    peft_type: Literal["IA3"]
    """The method."""
    target_modules: Targets = None
    """Modules that get a scale; None: the ones peft would choose for the backbone's family."""
    feedforward_modules: Modules = None
    """Those of `target_modules` whose input is scaled rather than their output; may be empty; None: peft's choice."""

    exclude_modules: Modules = None
    """Modules that get no scale though `target_modules` names them; text is a regular expression."""

    run_time = IA3
    refused: ClassVar[Mapping[str, PeftField]] = {
        **TUNER_FIELDS,
        **initial_values("init_ia3_weights"),
    }

    @model_validator(mode="after")
    def _feedforward_modules_are_targets(self) -> IA3Spec:
        if isinstance(self.target_modules, list) and isinstance(self.feedforward_modules, list):
            others = [name for name in self.feedforward_modules if name not in self.target_modules]
            if others:
                raise problem(f"feedforward_modules must be among target_modules: {', '.join(others)} is not")
        return self

    def default_targets(self, shape: BackboneShape) -> list[str]:
        """See `AdapterSpec.default_targets`."""
        return list(shape.names.targets.ia3)

    def scales_input(self, modules: Sequence[Module], shape: BackboneShape) -> list[Module]:
        """Those of the targeted modules whose input is scaled: peft asks if a path ends in a name, dot or not."""
        names = self._feedforward(shape)
        if isinstance(names, str):
            return [module for module in modules if re.fullmatch(names, module.path)]
        return [module for module in modules if any(module.path.endswith(name) for name in names)]

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`: divided if tensor ranks divide the side of the module that it scales."""
        column, ones = module.column_parallel, constant(1.0)
        if self.scales_input([module], shape):
            return {
                "ia3_l": AdapterTensor((1, module.in_features), module.layer, ones, None if column else 1)
            }
        size = (module.out_features, 1)
        return {"ia3_l": AdapterTensor(size, module.layer, ones, 0 if column else None, on_output=True)}

    def config(self, shape: BackboneShape) -> dict[str, Any]:
        """See `AdapterSpec.config`."""
        config, feedforward = super().config(shape), self._feedforward(shape)
        names = config["target_modules"]
        if isinstance(names, str) or isinstance(feedforward, str) or not set(feedforward) <= set(names):
            # peft wants the one to be a subset of the other, name by name: full paths always are.
            modules = self.modules(shape)
            config["target_modules"] = [module.path for module in modules]
            feedforward = [module.path for module in self.scales_input(modules, shape)]
        return {**config, "feedforward_modules": feedforward}

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`."""

        def section(op: BaseOpName, names: Sequence[str]) -> AdapterSpec:
            inputs = list(names) if op in ("linear_fc2", "shared_fc2") else []
            return cls(peft_type="IA3", target_modules=list(names), feedforward_modules=inputs)

        return [Sample(section, paired=True)]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve("IA3")

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`."""
        return Work(place.out_features, 4 * place.out_features)

    def _feedforward(self, shape: BackboneShape) -> str | list[str]:
        given = self.feedforward_modules
        return list(shape.names.targets.ia3_feedforward) if given is None else given


KIND = IA3Spec
