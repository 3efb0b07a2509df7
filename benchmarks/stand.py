"""One engine whose plan is changed between steps, so that policies take turns on the same tasks and records."""

from __future__ import annotations

import platform
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from workload import TaskShape, made_up_records, write_random_backbone

from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.fusion.balance import balanced_split
from megatron_mux.fusion.device import cpu_name
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.fusion.measure import Measuring, measure
from megatron_mux.fusion.plan import Plan
from megatron_mux.fusion.planner import Planner
from megatron_mux.fusion.planning_context import PlanningContext
from megatron_mux.fusion.profile import Profile
from megatron_mux.fusion.profile_store import about_run, load_profile, profile_directory, save_profile
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec
from tests.reference.records import Records

STEPS = 100_000
"""Of each task: more than any measurement takes."""


class Follows(Planning):
    """Follows the plan it is told to."""

    def __init__(self) -> None:
        super().__init__("spatial", 1)
        self.plan: Plan | None = None

    def begin(self, loads: Mapping[str, TaskLoad]) -> Plan:
        """See `Planning.begin`."""
        assert self.plan is not None
        return self.plan


@dataclass
class Stand:
    """Tasks on a backbone.

    Attributes:
        engine: Trains them.
        follows: Its plan.
        loads: The tasks, as the planner sees them.
        planner: Makes plans for them.
    """

    engine: Engine
    follows: Follows
    loads: dict[str, TaskLoad]
    planner: Planner

    def seconds(self, plans: Sequence[Plan], steps: int = 1) -> float:
        """Of one step of every task: `plans` one after another, `steps` of each without a flush; the slowest rank's."""
        parallel = self.engine.parallel
        parallel.most([0.0])  # waits for the others
        start = time.perf_counter()
        for plan in plans:
            self.follows.plan = plan
            taken = 0
            while taken < steps:
                taken += len(self.engine.steps(steps - taken))
        return parallel.most([time.perf_counter() - start])[0] / steps

    def alone(self) -> list[Plan]:
        """A plan for each task by itself."""
        return [self.planner.fixed("spatial", {name: load}) for name, load in self.loads.items()]

    def close(self) -> None:
        """Take the tasks away again."""
        for name in self.engine.tasks:
            self.engine.remove_task(name)


def stand(
    backbone: Backbone | Sequence[Backbone],
    parallel: Parallel,
    context: PlanningContext,
    specs: Sequence[TaskSpec],
    records: Sequence[Any],
) -> Stand:
    """Register tasks on a backbone, or this rank's stages of it."""
    follows = Follows()
    engine = Engine(backbone, parallel, follows)
    engine.register_tasks([Task(s, r) for s, r in zip(specs, records, strict=True)])
    return Stand(engine, follows, loads_of(specs, records, context.info), Planner(context))


def stand_on_stages(
    path: Path,
    parallel: Parallel,
    context: PlanningContext,
    specs: Sequence[TaskSpec],
    records: Sequence[Any],
) -> Stand:
    """The same on this rank's stages, layers divided by what these tasks make them take."""
    if parallel.pp_size > 1:
        tasks = loads_of(specs, records, context.info)
        context = context.with_split(balanced_split(context.with_tasks(tasks)))
    dtype = {4: torch.float32, 2: torch.bfloat16}[context.itemsize]
    stages = load_stages(path, parallel, dtype, split=context.mesh.split or None)
    return stand(stages, parallel, context, specs, records)


def loads_of(specs: Sequence[TaskSpec], records: Sequence[Any], info: Any) -> dict[str, TaskLoad]:
    """Tasks as the planner sees them."""
    return {
        s.name: TaskLoad.of(s, r.lengths, r.label_counts, info.shape)
        for s, r in zip(specs, records, strict=True)
    }


def profile_of(backbone: Backbone, measure_anew: bool = False) -> Profile:
    """This device's profile, measured if nobody has; the first process's, or others would make other plans."""
    about = about_run(backbone.shape, backbone.device.type, backbone.dtype, 1)
    profile = None if measure_anew else load_profile(about, profile_directory())
    if profile is None:
        if backbone.parallel.rank == 0:
            print("measuring the profile", file=sys.stderr)
        most = 2048 if backbone.device.type == "cpu" else 16384
        profile = measure(backbone, about, Measuring(most))
        if backbone.parallel.rank == 0:
            save_profile(profile, profile_directory())
    shared = [profile]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def random_backbone(shape: str, dtype: torch.dtype, rank: int = 0) -> Path:
    """The directory of a random backbone that all processes share; the first makes it if nobody has."""
    path = Path(tempfile.gettempdir()) / f"megatron-mux-random-{shape}-{str(dtype).removeprefix('torch.')}"
    if rank == 0:
        write_random_backbone(shape, path, dtype)
    dist.barrier()
    return path


def random_tasks(
    count: int, shortest: int, longest: int, tokens: int, vocab: int, seed: int
) -> tuple[list[TaskSpec], list[Records]]:
    """Tasks of mixed adapter kinds and lengths, each with the records of one step.

    Args:
        count: How many.
        shortest, longest: Bounds of their `max_length`, powers of two.
        tokens: About how many of them a step has, all tasks together.
        vocab: Of the backbone.
        seed: Of everything.
    """
    r = random.Random(seed)
    lengths = [n for n in (16, 32, 64, 128, 256, 512) if shortest <= n <= longest]
    specs, records = [], []
    for i in range(count):
        length = r.choice(lengths)
        batch = max(1, min(16, round(tokens / count / (0.6 * length))))
        specs.append(_spec(f"task-{i:02d}", r, batch, length))
        pairs = made_up_records(TaskShape("", batch, length), batch, vocab, seed=1000 * seed + i)
        records.append(Records(pairs))
    return specs, records


def _spec(name: str, r: random.Random, batch: int, length: int) -> TaskSpec:
    adapter: dict[str, Any] = r.choice(
        [
            {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
            {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_modules": "all-linear"},
            {"peft_type": "LORA", "r": 24, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"]},
            {"peft_type": "IA3"},
            {"peft_type": "BOTTLENECK", "bottleneck_size": 24},
        ]
    )
    return spec_of(name, adapter, batch, length)


def spec_of(name: str, adapter: dict[str, Any], batch: int, length: int, micro_batches: int = 1) -> TaskSpec:
    """A task that takes `micro_batches` times `batch` sequences of at most `length` tokens a step, in file order.

    Its learning rate changes nothing worth mentioning, so that every step computes the same.
    """
    return TaskSpec.model_validate(
        {
            "name": name,
            "adapter": adapter,
            "data": {"path": "made-up", "max_length": length, "shuffle": False},
            "training": {
                "per_device_train_batch_size": batch,
                "gradient_accumulation_steps": micro_batches,
                "learning_rate": 1e-12,
                "max_steps": STEPS,
            },
        }
    )


def surroundings(backbone: Backbone, threads: int) -> dict[str, Any]:
    """Hardware and versions."""
    names = ("torch", "megatron-core")
    gpu = torch.cuda.get_device_name() if backbone.device.type == "cuda" else None
    return {
        "backbone": str(backbone.info.path.name),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "hardware": gpu or f"{cpu_name()}, {threads} threads",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


QUICKSTART = Path(__file__).resolve().parents[1] / ".quickstart"
