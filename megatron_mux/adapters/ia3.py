"""IA3 (Liu et al., 2022), as in peft: learned factors on a module's output, bias included, or on its input.

On a row-parallel BaseOp outputs are scaled after the reduction over tensor ranks, inputs where they lie. On a
column-parallel BaseOp outputs are scaled where they lie; a module whose *input* is scaled there is computed anew for
the task's rows, since other modules in the same BaseOp (q beside k, say) read the input as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_mux.adapters.adapter import Adapter, TaskAdapter, register, tensor_key
from megatron_mux.adapters.configs import ia3_config
from megatron_mux.adapters.host import Site
from megatron_mux.adapters.targets import (
    Sizes,
    feedforward_of,
    match_feedforward,
)
from megatron_mux.layout import MicroBatch


class _InputScale(Adapter):
    """Factors on the input of a row-parallel BaseOp."""

    stages = frozenset({"before"})

    def __init__(self, factor: nn.Parameter) -> None:
        self.factor = factor

    def before(self, x: Tensor) -> Tensor:
        """See `Adapter.before`. As in peft, the factors are not rounded to a half-precision backbone's dtype."""
        return (x * self.factor.flatten()).to(x.dtype)


class _OutputScale(Adapter):
    """Factors on outputs of any BaseOp, and on inputs of modules in a column-parallel one."""

    def __init__(self, sites: list[tuple[Site, bool, nn.Parameter]]) -> None:
        self.module: Any = sites[0][0].info.module
        self.outputs: list[tuple[Tensor, nn.Parameter]] = []
        self.inputs: list[tuple[Tensor, nn.Parameter]] = []
        for site, feedforward, factor in sites:
            columns = site.part.columns.to(factor.device)
            (self.inputs if feedforward else self.outputs).append((columns, factor))
        self.stages = frozenset({"product"} if self.inputs else set()) | frozenset(
            {"after"} if self.outputs else set()
        )

    def product(self, x: Tensor, y: Tensor, batch: MicroBatch) -> Tensor:
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


@register
class IA3(TaskAdapter):
    """IA3 of one task."""

    peft_type = "IA3"

    def build(self) -> None:
        """See `TaskAdapter.build`."""
        self.feedforward = feedforward_of(self.spec, self.host.shape)
        for op, sites in self.host.sites(self.targets):
            paths = set(match_feedforward(self.feedforward, [site.path for site in sites]))
            made = [(site, site.path in paths, self._factor(site, site.path in paths)) for site in sites]
            first, feedforward, factor = made[0]
            # A row-parallel BaseOp is one module.
            input_scaled = feedforward and not first.column_parallel
            self.at[op] = _InputScale(factor) if input_scaled else _OutputScale(made)

    @staticmethod
    def tensor_shapes(spec: Any, paths: Sequence[str], sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """See `TaskAdapter.tensor_shapes`."""
        inputs = set(match_feedforward(feedforward_of(spec, sizes), paths))
        shapes: dict[str, tuple[int, ...]] = {}
        for path in paths:
            width, input_width = sizes.module_shape(path)
            shapes[tensor_key(path, "ia3_l")] = (1, input_width) if path in inputs else (width, 1)
        return shapes

    def config_dict(self) -> dict[str, Any]:
        """See `TaskAdapter.config_dict`."""
        return ia3_config(self.targets, self.feedforward, self.host.shape, self.host.module_paths())

    def _factor(self, site: Site, feedforward: bool) -> nn.Parameter:
        key = tensor_key(site.path, "ia3_l")
        first = self.host.first_tensor_rank
        shape = (1, site.info.in_features) if feedforward else (site.part.out_features, 1)
        if feedforward and site.column_parallel:
            return self.parameter(key, shape, _ones, partial=True, owner=first)
        if feedforward:
            return self.parameter(key, shape, _ones, dim=1, index=site.inputs)
        if site.column_parallel:
            return self.parameter(key, shape, _ones, dim=0, index=site.part.features)
        # Every rank scales the reduced output; with sequence parallelism, its own rows of it.
        return self.parameter(key, shape, _ones, partial=self.host.parallel.sequence_parallel, owner=first)


def _ones(full: Tensor, generator: torch.Generator) -> None:
    full.fill_(1.0)
