"""Builds the run to execute in a dry run, from a method's flags or from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.parser import parse_args
from megatron_mux.dry_run.heaviest_batch import Batch, steps_of, task_records
from megatron_mux.dry_run.run_spec import RunSpec
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import Plan, plan_for
from megatron_mux.gpus import Gpu
from megatron_mux.tasks import TaskSpec

if TYPE_CHECKING:
    from megatron_mux.backbone.residence import Kind
    from megatron_mux.fusion.plan import Policy


@dataclass(frozen=True)
class Workload:
    """What is trained, independent of the parallel method.

    Attributes:
        config: Contents of config.json.
        backbone: Directory of config.json.
        file: The task file.
        specs: Its tasks.
        batches: Heaviest batch of each task, and its evaluation pass if it is evaluated.
        gpu: The GPU whose kernels are assumed.
    """

    config: Mapping[str, Any]
    backbone: Path
    file: Path
    specs: Sequence[TaskSpec]
    batches: Sequence[tuple[Batch, Batch | None]]
    gpu: Gpu

    def by_flags(self, flags: Sequence[str], gpus: int) -> RunSpec:
        """The run that `pretrain_mux.py` starts with these flags.

        Args:
            flags: Command-line flags, with a policy other than `auto`.
            gpus: Number of processes.

        Raises:
            UserError: A flag is unknown or wrong.
        """
        arguments = parse_args([*flags, "--backbone", str(self.backbone), "--mux-tasks", str(self.file)])
        policy: Policy = arguments.mux_policy
        if policy == "auto":
            raise ValueError("policy auto needs a plan: use by_plan")
        tensor, ranks = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
        each = arguments.num_virtual_stages_per_pipeline_rank or 1
        chunk = arguments.mux_chunk_size
        plan = plan_for(
            policy,
            {spec.name: spec.training.gradient_accumulation_steps for spec in self._in_order()},
            ranks * each,
            arguments.mux_micro_batches,
            chunk if isinstance(chunk, int) else None,
            arguments.mux_align,
        )
        plan = replace(
            plan, virtual=each, schedule=arguments.mux_schedule, tensor=tensor, data=gpus // (tensor * ranks)
        )
        return self._run(
            plan,
            arguments.sequence_parallel,
            arguments.bf16,
            arguments.recompute_granularity,
            arguments.mux_backbone_weights,
            arguments.mux_rolling,
        )

    def by_plan(
        self,
        plan: Plan,
        bf16: bool = True,
        recompute: str | None = None,
        residence: Kind = "resident",
        sequence_parallel: bool = False,
    ) -> RunSpec:
        """The run that follows a plan.

        Args:
            plan: Plan for these tasks.
            bf16: Whether the backbone is in bfloat16, else in fp32.
            recompute: As `--recompute-granularity` has it.
            residence: As `--mux-backbone-weights` has it.
            sequence_parallel: As the flag has it.

        Raises:
            UserError: The plan is for other tasks.
        """
        names = {spec.name for spec in self.specs}
        if set(plan.tasks) != names:
            differ = ", ".join(sorted(set(plan.tasks) ^ names))
            raise UserError(f"--plan: its tasks differ from those of --tasks {self.file}: {differ}")
        return self._run(plan, sequence_parallel, bf16, recompute, residence, rolling=True)

    def _in_order(self) -> list[TaskSpec]:
        """In the engine's order: by name."""
        return sorted(self.specs, key=lambda spec: spec.name)

    def _run(
        self,
        plan: Plan,
        sequence_parallel: bool,
        bf16: bool,
        recompute: str | None,
        residence: Kind,
        rolling: bool,
    ) -> RunSpec:
        tasks = [
            task_records(spec, *batches, plan.ranks, plan.data)
            for spec, batches in zip(self.specs, self.batches, strict=True)
        ]
        return RunSpec(
            self.config,
            tasks,
            plan,
            plan.tensor,
            sequence_parallel,
            "bfloat16" if bf16 else "float32",
            recompute or "none",  # type: ignore[arg-type]
            residence,
            gpu=self.gpu,
            steps=steps_of(self.specs),
            rolling=rolling,
        )
