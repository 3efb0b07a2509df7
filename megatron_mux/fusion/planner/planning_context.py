"""What a plan is made from: backbone, ranks, tasks, profile, memory limit and what the user asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_mux.backbone.split import Split
from megatron_mux.fusion.alignment import Mode
from megatron_mux.fusion.graphs.launch_order import Interleave
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.stage_cost import StageCosts
from megatron_mux.fusion.planner.step_memory import Allowance, MemorySource, StepMemory, are_short
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.schedules import PIPELINE_SCHEDULES, Schedule
from megatron_mux.gpus import assumed
from megatron_mux.kernels.pointwise.choice import PointwiseName
from megatron_mux.memory.forms.method import ParallelConfig, Recompute

if TYPE_CHECKING:
    from megatron_mux.backbone.weight_offload import Kind

Chunking = int | Literal["auto"] | None
"""Tokens of a chunk; `auto`: chosen by predicted latency; None: packs are not cut."""

ROLLING_STEPS = 8
"""Steps between two flushes that predictions assume: a save, an evaluation or a report is due about that often."""


@dataclass(frozen=True)
class PlanningContext:
    """What the planner knows. Every step of planning takes it whole; nothing is passed beside it.

    Attributes:
        profile: Seconds of operators at this tensor-parallel degree.
        info: The backbone (`BackboneInfo`).
        mesh: How ranks and layers are divided.
        recompute: What is recomputed in the backward pass.
        memory_limit: Bytes that a rank may use; None: no limit. A limit needs `tables`.
        alignment: How sequences are padded, if at all.
        chunk: See `Chunking`.
        micro_batches: C; None: chosen.
        rolling: Steps between two flushes of the pipeline, where the schedule can do without one.
        residence: Where the backbone's weights live between uses.
        sequence_parallel: Whether tensor ranks divide the rows between their regions.
        interleave: How tensor ranks hide their messages; see `Interleave`.
        tasks: The tasks to plan for, by name.
        tables: What they take of memory; None: it is not predicted.
    """

    profile: Profile
    info: Any
    mesh: Mesh = Mesh()  # noqa: RUF009 (frozen)
    itemsize: int = 4
    recompute: Recompute = "none"
    memory_limit: float | None = None
    alignment: Mode = "dense"
    chunk: Chunking = "auto"
    micro_batches: int | None = None
    schedule: Schedule = "planned"
    rolling: int = 1
    residence: Kind = "resident"
    sequence_parallel: bool = False
    interleave: Interleave = "off"
    pointwise: PointwiseName | None = None
    tasks: Mapping[str, TaskLoad] = field(default_factory=dict)
    tables: MemorySource | None = None

    def with_tasks(self, tasks: Mapping[str, TaskLoad]) -> PlanningContext:
        """The same context for other tasks, sorted by name so that a plan does not depend on their order."""
        return replace(self, tasks={name: tasks[name] for name in sorted(tasks)})

    def with_split(self, split: Split) -> PlanningContext:
        """The same context with these layers in each stage."""
        return replace(self, mesh=replace(self.mesh, split=split))

    @property
    def steps_per_flush(self) -> int:
        """Steps that run between two flushes: more than one only in a pipeline whose schedule can roll on.

        A KL term is computed with the adapter as it is when the step begins, so a KTO task's steps do not roll.
        """
        waits = any(load.opening_passes for load in self.tasks.values())
        rolls = self.mesh.pipeline > 1 and PIPELINE_SCHEDULES[self.schedule].rolls and not waits
        return self.rolling if rolls else 1

    @property
    def hides_messages(self) -> bool:
        """Whether hybrid tasks may hide each other's messages."""
        return (self.mesh.tensor > 1 or self.mesh.exchanges) and self.interleave != "off"

    @property
    def in_step(self) -> bool:
        """Whether pipelines make the same passes at the same time, because each needs what others hold."""
        return self.residence.startswith("sharded") or self.mesh.over_data

    @property
    def method(self) -> ParallelConfig:
        """The parallel method, as the memory model describes it: it divides an expert among all tensor ranks."""
        return ParallelConfig(
            self.mesh.data,
            self.mesh.tensor,
            self.mesh.pipeline,
            self.mesh.managers or self.mesh.expert * (self.mesh.expert_tensor or 1) // self.mesh.tensor or 1,
            sequence_parallel=self.sequence_parallel,
            zero=3 if self.residence.startswith("sharded") and self.mesh.data > 1 else 0,
            recompute=self.recompute,
            offload=self.residence.endswith("offloaded"),
        )

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return self.mesh.stage_layers(self.info.shape.layers)

    def costs(self) -> StageCosts:
        """Seconds of these tasks' batches on each stage; bytes, too, if there is a limit."""
        return StageCosts(
            self.profile,
            self.info.shape,
            list(self.tasks.values()),
            self.stages,
            self.method,
            self.itemsize,
            self.interleave if self.hides_messages else "off",
            self.mesh.exchanges,
            None if self.memory_limit is None else self.step_memory(),
        )

    def step_memory(self) -> StepMemory:
        """What these tasks' batches keep and take.

        Raises:
            UserError: It cannot be predicted.
        """
        if self.tables is None:
            raise ValueError("memory is predicted from tables")
        loads = list(self.tasks.values())
        device = self.profile.about.get("kind", "cpu")
        gpu = assumed(str(self.profile.about.get("device", "")))[0].gpu
        shape = self.info.shape
        signatures = sorted({load.signature(shape) for load in loads})
        memory = self.tables.memory(self.mesh, self.recompute, signatures, are_short(loads))
        return StepMemory(memory, loads, shape, device, Allowance.of(device, gpu, self.method))
