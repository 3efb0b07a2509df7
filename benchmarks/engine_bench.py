"""An engine whose plan can be switched between steps, to time several plans on the same tasks and records."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from workload import TaskShape, random_records, write_random_backbone

from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner.balance import balanced_split
from megatron_mux.fusion.planner.load import TaskLoad
from megatron_mux.fusion.planner.planner import Planner
from megatron_mux.fusion.planner.planning_context import PlanningContext
from megatron_mux.fusion.profiler.measure import measure
from megatron_mux.fusion.profiler.profile import Profile
from megatron_mux.fusion.profiler.profile_store import (
    about_run,
    load_profile,
    profile_directory,
    save_profile,
)
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec
from tests.reference.records import Records

STEPS = 100_000
"""`max_steps` of each task, more than any measurement runs."""


class SwitchablePlanning(Planning):
    """Planning that always returns the plan in its attribute `plan`."""

    def __init__(self) -> None:
        super().__init__("spatial", 1)
        self.plan: Plan | None = None

    def begin(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """See `Planning.begin`."""
        assert self.plan is not None
        return self.plan


@dataclass
class EngineBench:
    """Tasks registered with one engine, and a planner for them.

    Attributes:
        engine: Trains the tasks.
        planning: Holds the plan that the next step follows.
        loads: The planner's view of each task, by name.
        planner: Makes plans for these tasks.
    """

    engine: Engine
    planning: SwitchablePlanning
    loads: dict[str, TaskLoad]
    planner: Planner

    def seconds(self, plans: Sequence[Plan], steps: int = 1) -> float:
        """Measure one step of every task, in seconds of the slowest rank.

        Args:
            plans: Run one after another; together they step every task.
            steps: Steps to run under each plan without a flush; the result is the average of one.
        """
        parallel = self.engine.parallel
        parallel.most([0.0])  # a barrier
        start = time.perf_counter()
        for plan in plans:
            self.planning.plan = plan
            taken = 0
            while taken < steps:
                taken += len(self.engine.steps(steps - taken))
        return parallel.most([time.perf_counter() - start])[0] / steps

    def alone(self) -> list[Plan]:
        """Make one plan per task, each for that task alone."""
        return [self.planner.fixed("spatial", {name: load}) for name, load in self.loads.items()]

    def close(self) -> None:
        """Remove the tasks from the engine."""
        for name in self.engine.tasks:
            self.engine.remove_task(name)


def make_bench(
    path: Path,
    parallel: Parallel,
    context: PlanningContext,
    specs: Sequence[TaskSpec],
    records: Sequence[Any],
) -> EngineBench:
    """Load this rank's stages, with layers divided by their cost for these tasks, and register the tasks."""
    loads = loads_of(specs, records, context.info)
    if parallel.pp_size > 1:
        context = context.with_split(balanced_split(context.with_tasks(loads)))
    dtype = {4: torch.float32, 2: torch.bfloat16}[context.itemsize]
    stages = load_stages(path, parallel, dtype, split=context.mesh.split or None)
    planning = SwitchablePlanning()
    engine = Engine(stages, parallel, planning)
    engine.register_tasks([Task(s, r) for s, r in zip(specs, records, strict=True)])
    return EngineBench(engine, planning, loads, Planner(context))


def loads_of(specs: Sequence[TaskSpec], records: Sequence[Any], info: Any) -> dict[str, TaskLoad]:
    """Describe each task to the planner, by name."""
    return {
        s.name: TaskLoad.of(s, r.lengths, r.label_counts, info.shape)
        for s, r in zip(specs, records, strict=True)
    }


def load_or_measure_profile(backbone: Backbone, remeasure: bool = False) -> Profile:
    """Load this device's profile, or measure and save it if there is none or it is to be measured anew.

    All ranks use the profile of rank 0, so that they make the same plans.
    """
    experts = backbone.parallel.experts
    about = about_run(backbone.shape, backbone.device.type, backbone.dtype, 1, expert_parallel=experts.size)
    profile = None if remeasure else load_profile(about, profile_directory())
    if profile is None:
        if backbone.parallel.rank == 0:
            print("measuring the profile", file=sys.stderr)
        most = 2048 if backbone.device.type == "cpu" else 16384
        profile = measure(backbone, about, most)
        if backbone.parallel.rank == 0:
            save_profile(profile, profile_directory())
    shared = [profile]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def random_backbone(shape: str, dtype: torch.dtype, rank: int = 0) -> Path:
    """Return the directory of a random backbone; rank 0 writes it if it does not exist yet."""
    path = Path(tempfile.gettempdir()) / f"megatron-mux-random-{shape}-{str(dtype).removeprefix('torch.')}"
    if rank == 0:
        write_random_backbone(shape, path, dtype)
    if dist.is_initialized():
        dist.barrier()
    return path


def backbone_of(arguments: argparse.Namespace, rank: int = 0) -> Path:
    """The directory that `--backbone` and `--backbone-shape` name, see `script.add_backbone`; in fp32."""
    if arguments.backbone_shape is None:
        return Path(arguments.backbone)
    return random_backbone(arguments.backbone_shape, torch.float32, rank)


def random_tasks(
    count: int, shortest: int, longest: int, tokens: int, vocab: int, seed: int
) -> tuple[list[TaskSpec], list[Records]]:
    """Make random tasks of mixed adapter kinds and lengths, each with the records of one step.

    Args:
        count: Number of tasks.
        shortest, longest: Bounds of their `max_length`, powers of two.
        tokens: Approximate number of tokens in a step of all tasks together.
        vocab: Vocabulary size of the backbone.
        seed: Seed of the adapter kinds, lengths and records.
    """
    r = random.Random(seed)
    lengths = [n for n in (16, 32, 64, 128, 256, 512) if shortest <= n <= longest]
    specs, records = [], []
    for i in range(count):
        length = r.choice(lengths)
        batch = max(1, min(16, round(tokens / count / (0.6 * length))))
        specs.append(_spec(f"task-{i:02d}", r, batch, length))
        pairs = random_records(TaskShape("", batch, length), batch, vocab, seed=1000 * seed + i)
        records.append(Records(pairs))
    return specs, records


def _spec(name: str, r: random.Random, batch: int, length: int) -> TaskSpec:
    adapter: dict[str, Any] = r.choice(
        [
            QV,
            {**ALL_LINEAR, "r": 16},
            {**QV, "r": 24, "target_modules": ["q_proj", "o_proj"]},
            {"peft_type": "IA3"},
            {"peft_type": "BOTTLENECK", "bottleneck_size": 24},
        ]
    )
    return spec_of(name, adapter, batch, length)


QV: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
ALL_LINEAR = {**QV, "target_modules": "all-linear"}


def spec_of(name: str, adapter: dict[str, Any], batch: int, length: int, **training: Any) -> TaskSpec:
    """Make a task whose step has `batch` sequences of at most `length` tokens, in file order.

    Its learning rate is negligible, so that every step computes the same; `training` has other fields.
    """
    return TaskSpec.model_validate(
        {
            "name": name,
            "adapter": adapter,
            "data": {"path": "made-up", "max_length": length, "shuffle": False},
            "training": {
                "per_device_train_batch_size": batch,
                "learning_rate": 1e-12,
                "max_steps": STEPS,
                **training,
            },
        }
    )
