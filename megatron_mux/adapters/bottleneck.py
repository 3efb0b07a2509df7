"""Bottleneck adapters (Houlsby et al., 2019): `y + scaling * up(act(down(y)))` after the end of a sublayer.

`y` is the finished output of the attention or MLP sublayer's last projection: reduced over tensor ranks, bias added,
the residual not yet. Every tensor rank computes the adapter on what it has of `y`: all rows, or its own rows with
sequence parallelism (the gradient is partial then).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, TaskAdapter, tensor_key, uniform, zeros
from megatron_mux.adapters.costs import Curve, Kept, Place, Row, Sample, Work
from megatron_mux.adapters.host import Host, Site
from megatron_mux.adapters.kind import COMMON_FIELDS, AdapterSpec, AdapterTensor
from megatron_mux.adapters.modules import Module, Shape, short_names
from megatron_mux.adapters.peft_config import stored_config, stored_targets
from megatron_mux.base_ops import COLUMN_PARALLEL, BaseOpName
from megatron_mux.errors import UserError
from megatron_mux.section import LARGEST_SIZE, Number, Refused, Targets

_WEIGHTS = ("adapter_down.weight", "adapter_down.bias", "adapter_up.weight", "adapter_up.bias")


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

    in_peft: ClassVar[bool] = False
    decisive: ClassVar[frozenset[str]] = frozenset({"bottleneck_size", "non_linearity", "scaling"})
    refused: ClassVar[Mapping[str, Refused]] = COMMON_FIELDS

    def default_targets(self, shape: Shape) -> list[str]:
        """Every sublayer's last projection, as in the paper."""
        return list(shape.default_targets.bottleneck)

    def check_modules(self, modules: Sequence[Module], shape: Shape) -> None:
        """Refuse targets other than the ends of sublayers.

        A bottleneck sees the whole output of what it follows. Elsewhere that output is divided over tensor ranks and
        is a head's query, key or value, where no published method puts one.

        Raises:
            UserError: Names those targets.
        """
        wrong = short_names(module.path for module in modules if module.op in COLUMN_PARALLEL)
        if wrong:
            raise UserError(
                "target_modules: a BOTTLENECK follows the end of an attention or MLP sublayer, not "
                f"{', '.join(wrong)}: choose from {', '.join(shape.sublayer_outputs)}"
            )

    def tensors(self, shape: Shape) -> dict[str, AdapterTensor]:
        """See `AdapterSpec.tensors`: a bottleneck sees the whole output, so nothing is divided."""
        found: dict[str, AdapterTensor] = {}
        for module in self.modules(shape):
            width, inner = module.out_features, self.bottleneck_size
            shapes = ((inner, width), (inner,), (width, inner), (width,))
            for name, size in zip(_WEIGHTS, shapes, strict=True):
                found[tensor_key(module.path, name)] = AdapterTensor(size, module.layer)
        return found

    def config(self, shape: Shape) -> dict[str, Any]:
        """See `AdapterSpec.config`."""
        fields = {name: getattr(self, name) for name in ("bottleneck_size", "non_linearity", "scaling")}
        return stored_config(self, {**fields, "target_modules": stored_targets(self, shape)})

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """See `AdapterSpec.samples`."""

        def section(size: int) -> Callable[[BaseOpName, Sequence[str]], AdapterSpec]:
            return lambda op, names: cls(
                peft_type="BOTTLENECK", bottleneck_size=size, target_modules=list(names)
            )

        ends: tuple[BaseOpName, ...] = ("linear_proj", "linear_fc2")
        return [Sample(section(8), ends, pair="linear_proj"), Sample(section(64), ends)]

    def curve(self, modules: int) -> Curve:
        """See `AdapterSpec.curve`."""
        return Curve("BOTTLENECK", self.bottleneck_size)

    def work(self, place: Place) -> Work:
        """See `AdapterSpec.work`."""
        return Work(4 * self.bottleneck_size * place.out_features, 3 * place.out_features)

    def kept(self, place: Place, modules: Sequence[Module], shape: Shape) -> Kept:
        """See `AdapterSpec.kept`."""
        rows = (Row("bottleneck", "rows", 2 * self.bottleneck_size),)
        matrices = 2 * self.bottleneck_size * place.out_features
        return Kept(output=True, rows=rows, whole=matrices, copied_if_rounded=True)

    def attach(
        self, host: Host, task: Any, total_steps: int, initial: Mapping[str, Tensor] | None
    ) -> TaskAdapter:
        """See `AdapterSpec.attach`."""
        return Bottleneck(host, task, total_steps, initial)


class Bottleneck(TaskAdapter):
    """Bottleneck adapters of one task."""

    spec: BottleneckSpec

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        for op, sites in self.host.sites(self.spec.modules(self.host.shape)):
            self.at[op] = self._after(sites[0])

    def _after(self, site: Site) -> _After:
        partial = self.host.parallel.sequence_parallel
        down, down_bias, up, up_bias = (
            self.parameter(tensor_key(site.path, name), init, site, partial=partial, decay="bias" not in name)
            for name, init in zip(_WEIGHTS, (uniform, zeros, zeros, zeros), strict=True)
        )
        return _After(self.spec, (down, down_bias), (up, up_bias))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class _After(Adapter):
    """The bottleneck of one task after one BaseOp."""

    stages = frozenset({"after"})

    def __init__(
        self,
        spec: BottleneckSpec,
        down: tuple[nn.Parameter, nn.Parameter],
        up: tuple[nn.Parameter, nn.Parameter],
    ):
        self.activation = _ACTIVATIONS[spec.non_linearity]
        self.scaling: float = spec.scaling
        self.down = down
        self.up = up

    def after(self, y: Tensor) -> Tensor:
        """See `Adapter.after`."""
        down, down_bias, up, up_bias = (p.to(y.dtype) for p in (*self.down, *self.up))
        hidden = self.activation(F.linear(y, down, down_bias))
        return torch.add(y, F.linear(hidden, up, up_bias), alpha=self.scaling)


KIND = BottleneckSpec
