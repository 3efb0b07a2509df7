"""Runs to rehearse: as the flags of a method say, or a whole plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.arguments.parser import parse_args
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import Plan, plan_for
from megatron_mux.gpus import Gpu
from megatron_mux.rehearsal.casting import Batch, cast, steps_of
from megatron_mux.rehearsal.setting import Setting
from megatron_mux.tasks import TaskSpec

if TYPE_CHECKING:
    from megatron_mux.backbone.residence import Kind
    from megatron_mux.fusion.plan import Policy


@dataclass(frozen=True)
class Work:
    """What is trained, whatever the method.

    Attributes:
        config: What config.json says.
        backbone: Its directory.
        file: The task file.
        specs: Its tasks.
        batches: The heaviest batch of each, and of those that are evaluated a pass.
        gpu: The GPUs.
    """

    config: Mapping[str, Any]
    backbone: Path
    file: Path
    specs: Sequence[TaskSpec]
    batches: Sequence[tuple[Batch, Batch | None]]
    gpu: Gpu

    def by_flags(self, flags: Sequence[str], gpus: int) -> Setting:
        """The run that `pretrain_mux.py` makes with these flags.

        Args:
            flags: Its policy is none of the planner's.
            gpus: Processes that are started.

        Raises:
            UserError: A flag is none.
        """
        arguments = parse_args([*flags, "--backbone", str(self.backbone), "--mux-tasks", str(self.file)])
        policy: Policy = arguments.mux_policy
        if policy == "auto":
            raise ValueError("a planner's run is rehearsed by its plan")
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
        return self._setting(
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
    ) -> Setting:
        """The run that follows a plan.

        Args:
            plan: Of these tasks.
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
            raise UserError(f"--plan: it and --tasks {self.file} do not have the same tasks: {differ}")
        return self._setting(plan, sequence_parallel, bf16, recompute, residence, rolling=True)

    def _in_order(self) -> list[TaskSpec]:
        """As the engine has them: by name."""
        return sorted(self.specs, key=lambda spec: spec.name)

    def _setting(
        self,
        plan: Plan,
        sequence_parallel: bool,
        bf16: bool,
        recompute: str | None,
        residence: Kind,
        rolling: bool,
    ) -> Setting:
        casts = [
            cast(spec, *batches, plan.ranks, plan.data)
            for spec, batches in zip(self.specs, self.batches, strict=True)
        ]
        return Setting(
            self.config,
            casts,
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
