"""Builds the run to execute in a dry run from command-line flags, and from a plan if one is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_mux.arguments.model import MuxArguments
from megatron_mux.arguments.parser import parse_args
from megatron_mux.choice.task_file import TaskFile
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.dry_run.worst_case_batch import Batch, steps_of, task_records
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import Plan, plan_for
from megatron_mux.gpus import Gpu


@dataclass(frozen=True)
class Workload:
    """What is trained, independent of the parallel method.

    Attributes:
        backbone: Directory of config.json.
        batches: Heaviest batch of each task, and its evaluation pass if it is evaluated.
        gpu: The GPU whose kernels are assumed.
    """

    config: Mapping[str, Any]
    backbone: Path
    file: TaskFile
    batches: Sequence[tuple[Batch, Batch | None]]
    gpu: Gpu

    def run(self, flags: Sequence[str], gpus: int, plan: Plan | None = None) -> RunSpec:
        """The run that `pretrain_mux.py` starts with these flags.

        Args:
            flags: Command-line flags, with a policy other than `auto` unless a plan is given.
            plan: The plan that the run follows; None for the one of the flags.

        Raises:
            UserError: A flag is unknown or wrong, or the plan is for other tasks.
        """
        arguments = parse_args([*flags, "--backbone", str(self.backbone), "--mux-tasks", str(self.file.path)])
        plan = self._plan(arguments, gpus) if plan is None else self._checked(plan)
        tasks = [
            task_records(spec, *batches, plan.ranks, plan.data)
            for spec, batches in zip(self.file.specs, self.batches, strict=True)
        ]
        expert, expert_tensor = arguments.expert_sizes(
            read_info(self.config, arguments.mux_backbone_dtype).shape
        )
        return RunSpec(
            self.config,
            tasks,
            plan,
            plan.tensor,
            arguments.sequence_parallel,
            "bfloat16" if arguments.bf16 else "float32",
            arguments.recompute_granularity or "none",
            arguments.mux_backbone_weights,
            gpu=self.gpu,
            steps=steps_of(self.file.specs),
            rolling=arguments.mux_rolling,
            expert=expert,
            expert_tensor=expert_tensor,
            placement=self.file.architecture.placement,
            access=self.file.architecture.access,
            quantise=arguments.mux_backbone_dtype,
        )

    def _plan(self, arguments: MuxArguments, gpus: int) -> Plan:
        """The plan of a policy other than `auto`."""
        policy = arguments.mux_policy
        if policy == "auto":
            raise ValueError("policy auto needs a plan")
        tensor, ranks = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
        each = arguments.num_virtual_stages_per_pipeline_rank or 1
        chunk = arguments.mux_chunk_size
        in_order = sorted(self.file.specs, key=lambda spec: spec.name)  # the engine's order
        plan = plan_for(
            policy,
            {spec.name: spec.training.gradient_accumulation_steps for spec in in_order},
            ranks * each,
            arguments.mux_micro_batches,
            chunk if isinstance(chunk, int) else None,
            arguments.mux_align,
        )
        return replace(
            plan, virtual=each, schedule=arguments.mux_schedule, tensor=tensor, data=gpus // (tensor * ranks)
        )

    def _checked(self, plan: Plan) -> Plan:
        """Raise UserError if a plan is for other tasks."""
        names = {spec.name for spec in self.file.specs}
        if set(plan.tasks) != names:
            differ = ", ".join(sorted(set(plan.tasks) ^ names))
            raise UserError(f"--plan: its tasks differ from those of --tasks {self.file.path}: {differ}")
        return plan
