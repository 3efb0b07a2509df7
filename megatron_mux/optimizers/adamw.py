"""AdamW of `torch.optim`, in its fused form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_mux.optimizers.optimizer import FlatOptimizer, Options, ParamLayout


class AdamW(FlatOptimizer):
    """AdamW (Loshchilov and Hutter, 2019)."""

    names = ("adamw_torch_fused", "adamw_torch")
    states_per_value = 2
    state_names = ("exp_avg", "exp_avg_sq")
    launches, traffic, together = 2, 28, True

    def __init__(self, layout: ParamLayout, options: Options) -> None:
        super().__init__(layout, options)
        self._count = torch.zeros((), device=layout.values.device)

    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        average, square = self.flats.values()
        for first, last, decay, factor in self.layout.groups:
            adamw(
                [self.layout.values[first:last]],
                [self.layout.gradients[first:last]],
                [average[first:last]],
                [square[first:last]],
                [],
                [self._count.fill_(step)],
                beta1=self.options.beta1,
                beta2=self.options.beta2,
                eps=self.options.epsilon,
                lr=rate * factor,
                weight_decay=decay,
                amsgrad=False,
                maximize=False,
                fused=True,
                # torch's fused optimizers look at `found_inf` for what a gradient scaler has found.
                found_inf=skip,
            )
