"""Bottleneck adapters (Houlsby et al., 2019): `y + scaling * up(act(down(y)))` after the end of a sublayer.

`y` is the finished output of the attention or MLP sublayer's last projection: reduced over tensor ranks, bias added,
the residual not yet. Every tensor rank computes the adapter on what it has of `y`: all rows, or its own rows with
sequence parallelism (the gradient is partial then).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, TaskAdapter, register, tensor_key
from megatron_mux.adapters.configs import own_config
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.targets import Sizes, check_bottleneck, match_targets

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class BottleneckAdapter(Adapter):
    """The bottleneck of one task after one BaseOp."""

    stages = frozenset({"after"})

    def __init__(
        self, spec: Any, down: tuple[nn.Parameter, nn.Parameter], up: tuple[nn.Parameter, nn.Parameter]
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


@register
class Bottleneck(TaskAdapter):
    """Bottleneck adapters of one task."""

    peft_type = "BOTTLENECK"

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        check_bottleneck(match_targets(self.targets, self.host.module_paths()), self.host.shape)
        for op, sites in self.host.sites(self.targets):
            self.at[op] = self._adapter(sites[0])

    @staticmethod
    def tensor_shapes(spec: Any, paths: Sequence[str], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `TaskAdapter.tensor_shapes`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            width, size = sizes.hidden, spec.bottleneck_size
            shapes[tensor_key(path, "adapter_down.weight")] = (size, width)
            shapes[tensor_key(path, "adapter_down.bias")] = (size,)
            shapes[tensor_key(path, "adapter_up.weight")] = (width, size)
            shapes[tensor_key(path, "adapter_up.bias")] = (width,)
        return shapes

    def config_dict(self) -> dict[str, Any]:
        """See `TaskAdapter.config_dict`."""
        fields = {name: getattr(self.spec, name) for name in ("bottleneck_size", "non_linearity", "scaling")}
        return own_config(self.peft_type, fields, self.targets, self.host.module_paths())

    def _adapter(self, site: Site) -> BottleneckAdapter:
        width, size = site.part.out_features, self.spec.bottleneck_size

        def make(
            suffix: str, shape: tuple[int, ...], init: Callable[[Tensor, torch.Generator], Any]
        ) -> nn.Parameter:
            return self.parameter(
                tensor_key(site.path, suffix),
                shape,
                init,
                partial=self.host.parallel.sequence_parallel,
                owner=self.host.first_tensor_rank,
                decay=len(shape) > 1,
            )

        down = (
            make("adapter_down.weight", (size, width), _uniform),
            make("adapter_down.bias", (size,), _zeros),
        )
        up = make("adapter_up.weight", (width, size), _zeros), make("adapter_up.bias", (width,), _zeros)
        return BottleneckAdapter(self.spec, down, up)


def _uniform(full: Tensor, generator: torch.Generator) -> None:
    nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)


def _zeros(full: Tensor, generator: torch.Generator) -> None:
    full.zero_()
