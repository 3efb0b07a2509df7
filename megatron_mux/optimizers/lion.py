"""Lion with one fp32 state, the formula of bitsandbytes' `Lion`."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_mux.optimizers.optimizer import FlatOptimizer, Options, ParamLayout

_AT_ONCE = 1 << 20
"""Values that are stepped together: bounds the buffers."""


class Lion(FlatOptimizer):
    """Lion (Chen et al., 2023): steps by the sign of an interpolated momentum, with decoupled weight decay."""

    names = ("lion_32bit",)
    states_per_value = 1
    state_names = ("exp_avg",)
    launches, traffic, at_once = 9, 100, _AT_ONCE

    def __init__(self, layout: ParamLayout, options: Options) -> None:
        super().__init__(layout, options)
        size = min(_AT_ONCE, layout.values.numel())
        self._sign, self._next = (torch.empty_like(layout.values[:size]) for _ in range(2))

    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        skipped = skip != 0
        for first, last, decay, factor in self.layout.groups:
            for start in range(first, last, _AT_ONCE):
                self._update(slice(start, min(last, start + _AT_ONCE)), rate * factor, decay, skipped)

    def _update(self, part: slice, rate: float, decay: float, skipped: Tensor) -> None:
        values, gradients, average = (
            flat[part] for flat in (self.layout.values, self.layout.gradients, self.flats["exp_avg"])
        )
        beta1, beta2, _ = self.options
        sign, new = self._sign[: values.numel()], self._next[: values.numel()]
        torch.mul(average, beta1, out=sign).add_(gradients, alpha=1 - beta1).sign_()
        torch.mul(values, 1 - rate * decay, out=new).add_(sign, alpha=-rate)
        # Selected, not scaled by zero: what is skipped may be NaN.
        torch.where(skipped, values, new, out=values)
        torch.mul(average, beta2, out=new).add_(gradients, alpha=1 - beta2)
        torch.where(skipped, average, new, out=average)

    @property
    def tensors(self) -> list[Tensor]:
        """See `Optimizer.tensors`."""
        return [*super().tensors, self._sign, self._next]
