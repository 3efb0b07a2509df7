"""Megatron-Core's own 1F1B, one task at a time, over the same stages, adapters, optimizers and data.

Only the schedule differs: its warm-up, steady state and cool-down for each task's step, then that task's norm and
optimizer step, then the next task. `TrainStep` computes the passes on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_mux.backbone.model import Backbone
from megatron_mux.engine import Engine, Planning
from megatron_mux.engine.step_runner import StepRunner
from megatron_mux.engine.train_step import TrainStep
from megatron_mux.fusion.plan import Plan
from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.pipeline.execute import Timer, execute
from megatron_mux.pipeline.template import Template
from megatron_mux.runtime import Parallel


class MegatronEngine(Engine):
    """An engine that can hand a step to Megatron-Core's schedule."""

    def __init__(self, stages: Sequence[Backbone], parallel: Parallel, planning: Planning) -> None:
        super().__init__(stages, parallel, planning, tries_plans=False)
        exchange = self._runner.exchange
        self._runner = self._switchable_runner = _Runner(
            self.stages, parallel, planning, self.communicator, exchange, None
        )

    @property
    def uses_megatron(self) -> bool:
        """Whether Megatron-Core's schedule runs the steps; it needs one bucket with micro-batches of equal rows."""
        return self._switchable_runner.uses_megatron

    @uses_megatron.setter
    def uses_megatron(self, value: bool) -> None:
        self._switchable_runner.uses_megatron = value


class _Runner(StepRunner):
    """Runs a step with Megatron-Core's schedule if `uses_megatron`, else with the plan's template."""

    uses_megatron = False

    def _execute(self, template: Template, compute: TrainStep, plan: Plan, timer: Timer | None) -> None:
        if not self.uses_megatron:
            super()._execute(template, compute, plan, timer)
            return
        from megatron.core.pipeline_parallel import schedules

        if self.parallel.device.type == "cpu":
            schedules.torch = _TorchWithoutCuda()
        (stage,) = self.stages.values()
        chunk_ids = [action.chunk_id for action in template[self.parallel.pp_rank] if action.kind == "F"]
        rows = {compute.batches[chunk_id][0].rows for chunk_id in chunk_ids}
        if len(plan.buckets) != 1 or len(rows) != 1 or len(compute.batches[chunk_ids[0]]) != 1:
            raise ValueError("Megatron-Core's schedule needs micro-batches of one task with equal rows")
        schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=_forward_step,
            data_iterator=iter(chunk_ids),
            model=_Stage(compute, self.parallel.pp_rank, stage.model, len(chunk_ids)),
            num_microbatches=len(chunk_ids),
            seq_length=rows.pop(),
            micro_batch_size=1,
        )
        ends = tuple(tuple(action for action in actions if not action.is_pass) for actions in template)
        execute(ends, self.parallel.pp_rank, compute, self.communicator, stage.dtype)


class _TorchWithoutCuda:
    """Stands in for `torch` within Megatron-Core's schedules, which allocate a counter on the GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any = None, **options: Any) -> Tensor:
        """Allocate on the CPU, whatever `device` says."""
        return torch.zeros(*sizes, **options)


class _Stage(nn.Module):
    """A stage as Megatron-Core's schedules need it: a configuration, `set_input_tensor` and `forward`."""

    def __init__(self, compute: TrainStep, stage: int, model: Any, micro_batches: int) -> None:
        super().__init__()
        self.compute = compute
        self.stage = stage
        self.config, self.model_type = model.config, model.model_type
        self.micro_batches = micro_batches
        self.hidden: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Receive the previous stage's output; called before each forward pass."""
        self.hidden = tensors[0]

    def forward(self, chunk_id: ChunkId) -> Tensor:
        """Return the hidden states, or on the last stage the loss."""
        return self.compute.forward(Action.of(self.stage, "F", chunk_id), self.hidden)


def _forward_step(chunk_ids: Iterator[ChunkId], model: _Stage) -> tuple[Tensor, Any]:
    """The `forward_step_func` of Megatron-Core's schedules."""
    # The schedule divides the loss by the number of micro-batches; ours are weighted already.
    return model(next(chunk_ids)), lambda loss: (loss * model.micro_batches, {"loss": loss.detach()})
