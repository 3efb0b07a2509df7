"""An engine whose plan can be switched between steps, to time several plans on the same tasks and records."""

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
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from workload import TaskShape, random_records, write_random_backbone

from megatron_mux.backbone.model import Backbone, load_stages
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.fusion.device import cpu_name
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
    backbone: Backbone | Sequence[Backbone],
    parallel: Parallel,
    context: PlanningContext,
    specs: Sequence[TaskSpec],
    records: Sequence[Any],
) -> EngineBench:
    """Register tasks with an engine on a backbone, or on this rank's stages of one."""
    planning = SwitchablePlanning()
    engine = Engine(backbone, parallel, planning)
    engine.register_tasks([Task(s, r) for s, r in zip(specs, records, strict=True)])
    return EngineBench(engine, planning, loads_of(specs, records, context.info), Planner(context))


def make_bench_on_stages(
    path: Path,
    parallel: Parallel,
    context: PlanningContext,
    specs: Sequence[TaskSpec],
    records: Sequence[Any],
) -> EngineBench:
    """Load this rank's stages, with layers divided by their cost for these tasks, and register the tasks."""
    if parallel.pp_size > 1:
        tasks = loads_of(specs, records, context.info)
        context = context.with_split(balanced_split(context.with_tasks(tasks)))
    dtype = {4: torch.float32, 2: torch.bfloat16}[context.itemsize]
    stages = load_stages(path, parallel, dtype, split=context.mesh.split or None)
    return make_bench(stages, parallel, context, specs, records)


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


def use_processor_time() -> None:
    """Have profiles and steps timed by seconds of this process's processor, not the clock's: for a single process with
    one thread, on a machine that others use."""
    timed: Any = SimpleNamespace(perf_counter=time.process_time)
    for module in (sys.modules[__name__], sys.modules[measure.__module__]):
        module.time = timed  # type: ignore[attr-defined]


class MachineSpeed:
    """Times the same products again and again: how fast the machine is at the moment.

    Args:
        parallel: All ranks compute at the same time.
    """

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        device = parallel.device
        # More weights than caches hold, so that memory counts as well as arithmetic.
        self._weights = [torch.randn(1024, 4096, device=device) for _ in range(16)]
        self._rows = torch.randn(64, 1024, device=device)

    def seconds(self) -> float:
        """Of the slowest rank."""
        self.parallel.most([0.0])  # a barrier
        start = time.perf_counter()
        for weight in self._weights * 2:
            self._rows @ weight
        if self.parallel.device.type == "cuda":
            torch.cuda.synchronize()
        return self.parallel.most([time.perf_counter() - start])[0]


def random_backbone(shape: str, dtype: torch.dtype, rank: int = 0, layers: int | None = None) -> Path:
    """Return the directory of a random backbone; rank 0 writes it if it does not exist yet.

    `layers` replaces those of the shape.
    """
    name = f"{shape}-{str(dtype).removeprefix('torch.')}" + (f"-{layers}" if layers else "")
    path = Path(tempfile.gettempdir()) / f"megatron-mux-random-{name}"
    if rank == 0:
        write_random_backbone(shape, path, dtype, layers)
    dist.barrier()
    return path


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


def long_task(tokens: int, vocab: int) -> tuple[list[TaskSpec], list[Records]]:
    """Make a LoRA task whose step is one sequence of so many tokens, half of them labelled."""
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    shape = TaskShape("", 1, tokens, min_length=tokens)
    return [spec_of("long", adapter, 1, tokens)], [Records(random_records(shape, 1, vocab, seed=1))]


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
    """Make a task whose step has `micro_batches` times `batch` sequences of at most `length` tokens, in file order.

    Its learning rate is negligible, so that every step computes the same.
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


def environment(backbone: Backbone, threads: int) -> dict[str, Any]:
    """Describe the backbone, the hardware and the versions, for the result file."""
    names = ("torch", "megatron-core")
    gpu = torch.cuda.get_device_name() if backbone.device.type == "cuda" else None
    return {
        "backbone": str(backbone.info.path.name),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "hardware": gpu or f"{cpu_name()}, {threads} threads",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
    }


QUICKSTART = Path(__file__).resolve().parents[1] / ".quickstart"
