"""SGD without momentum, as `transformers.Trainer` sets it up."""

from __future__ import annotations

from torch import Tensor
from torch.optim.sgd import sgd

from megatron_mux.optimizers.optimizer import FlatOptimizer


class SGD(FlatOptimizer):
    """Stochastic gradient descent; weight decay is part of the gradient."""

    names = ("sgd",)
    states_per_value = 0
    launches, traffic, together = 1, 12, True

    def update(self, step: int, rate: float, skip: Tensor) -> None:
        """See `Optimizer.update`."""
        for first, last, decay, factor in self.layout.groups:
            sgd(
                [self.layout.values[first:last]],
                [self.layout.gradients[first:last]],
                [None],
                lr=rate * factor,
                weight_decay=decay,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                fused=True,
                found_inf=skip,
            )
