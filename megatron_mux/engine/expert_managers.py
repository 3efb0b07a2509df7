"""What training steps need where expert managers hold the routed experts and their adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import TaskState
from megatron_mux.runtime import Parallel


class ManagerSums(StepExtension):
    """Sums statistics over a master and its managers: each owns part of the adapters, and the master has the losses."""

    @classmethod
    def wanted_by(cls, task: TaskState, parallel: Parallel) -> bool:
        """Whether ranks have the adapters of their own experts alone."""
        return parallel.experts.divides_adapters

    def complete(self, stats: Tensor) -> None:
        """Sum the statistics over all of them."""
        dist.all_reduce(stats, group=self.burst.parallel.experts.group)


def ask_for_lowest_adapter(
    stages: Iterable[Backbone], parallel: Parallel, lowest: Callable[[Backbone], int]
) -> None:
    """Have a manager's stages ask for the lowest layer with an adapter: most adapters are on the master."""
    if not parallel.experts.holds_rows:
        for stage in stages:
            stage.lowest_adapter = lowest
