"""Bottleneck adapters (Houlsby et al., 2019): `y + scaling * up(act(down(y)))` after the end of a sublayer.

`y` is the finished output of the attention or MLP sublayer's last projection: reduced over tensor ranks, bias added,
the residual not yet. Every tensor rank computes the adapter on what it has of `y`: all rows, or its own rows with
sequence parallelism (the gradient is partial then).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from megatron_mux.adapters.adapter import Adapter, Grouped, TaskAdapter
from megatron_mux.adapters.costs import BaseOpWidths, Curve, Work
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.kind import AdapterSpec, Sample
from megatron_mux.adapters.parameter import AdapterParameter
from megatron_mux.adapters.peft_fields import OUR_FIELDS
from megatron_mux.adapters.targets import short_names
from megatron_mux.adapters.tensors import AdapterTensor, constant, uniform
from megatron_mux.base_ops import BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.kernels.low_rank.terms import BiasedActivation, Term
from megatron_mux.section import LARGEST_SIZE, Number, Targets
from megatron_mux.shape import BackboneShape, Module

_ENDS: tuple[BaseOpName, ...] = ("linear_proj", "linear_fc2")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class _After(Adapter):
    """The bottleneck of one task after one BaseOp."""

    stages = frozenset({"after"})
    grouped = frozenset[Grouped]({"after"})

    def __init__(self, owner: TaskAdapter, weights: list[AdapterParameter]) -> None:
        self.owner = owner
        self.activation = _ACTIVATIONS[owner.spec.non_linearity]
        self.scaling: float = owner.spec.scaling
        self.weights = weights

    def after(self, y: Tensor) -> Tensor:
        """See `Adapter.after`."""
        down, down_bias, up, up_bias = (self.owner.flat_params.rounded(p) for p in self.weights)
        hidden = self.activation(F.linear(y, down, down_bias))
        return torch.add(y, F.linear(hidden, up, up_bias), alpha=self.scaling)

    def row_terms(self, stage: Grouped, slot: int) -> list[Term]:
        """See `Adapter.row_terms`."""
        down, down_bias, up, up_bias = map(self.owner.flat_params.copy_of, self.weights)
        gradients: list[Any] = [p.value.grad for p in self.weights]
        activation = BiasedActivation(
            self.owner.spec.non_linearity, down_bias, up_bias, gradients[1], gradients[3]
        )
        return [Term(slot, down, up, self.scaling, None, gradients[0], gradients[2], activation=activation)]


class Bottleneck(TaskAdapter):
    """Bottleneck adapters of one task."""

    def adapt(self, modules: list[tuple[Site, list[AdapterParameter]]]) -> _After:
        """See `TaskAdapter.adapt`: the end of a sublayer is one module."""
        return _After(self, modules[0][1])


class BottleneckSpec(AdapterSpec):
    """Bottleneck adapter (Houlsby et al.): `y + scaling * up(non_linearity(down(y)))` after a module."""

    peft_type: Literal["BOTTLENECK"]
    """The method."""
    bottleneck_size: int = Field(default=64, ge=1, le=LARGEST_SIZE)
    """Width between the two projections."""
    non_linearity: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    """What stands between the two projections."""
    scaling: Number = 1.0
    """Factor of the adapter's output."""
    target_modules: Targets = None
    """Modules that get an adapter: ends of an attention or MLP sublayer; None: all of these."""

    run_time = Bottleneck
    in_peft = False
    refused = OUR_FIELDS

    def default_targets(self, shape: BackboneShape) -> list[str]:
        """Every sublayer's last projection, as in the paper."""
        return list(shape.names.targets.bottleneck)

    def modules(self, shape: BackboneShape) -> list[Module]:
        """See `AdapterSpec.modules`: refuses targets other than the ends of sublayers.

        A bottleneck sees the whole output of what it follows. Elsewhere that output is divided over tensor ranks and
        is a head's query, key or value, where no published method puts one.
        """
        modules = super().modules(shape)
        wrong = short_names(module for module in modules if module.column_parallel)
        if wrong:
            ends = [end.path for op in _ENDS for end in shape.names.ops[op]]
            raise UserError(
                "target_modules: a BOTTLENECK follows the end of an attention or MLP sublayer, not "
                f"{', '.join(wrong)}: choose from {', '.join(ends)}"
            )
        return modules

    def module_tensors(self, module: Module, shape: BackboneShape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.module_tensors`: a bottleneck sees the whole output, so nothing is divided."""
        width, inner = module.out_features, self.bottleneck_size
        tensors = {
            "adapter_down.weight": ((inner, width), uniform),
            "adapter_down.bias": ((inner,), constant(0.0)),
            "adapter_up.weight": ((width, inner), constant(0.0)),
            "adapter_up.bias": ((width,), constant(0.0)),
        }
        return {
            name: AdapterTensor(size, module.layer, init, decay="bias" not in name, on_output=True)
            for name, (size, init) in tensors.items()
        }

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`."""

        def section(size: int) -> Callable[[BaseOpName, Sequence[str]], AdapterSpec]:
            return lambda op, names: cls(
                peft_type="BOTTLENECK", bottleneck_size=size, target_modules=list(names)
            )

        return [Sample(section(8), paired=True), Sample(section(64))]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve("BOTTLENECK", self.bottleneck_size)

    def work(self, place: BaseOpWidths) -> Work:
        """See `AdapterSpec.work`."""
        return Work(4 * self.bottleneck_size * place.out_features, 5 * place.out_features)


KIND = BottleneckSpec
