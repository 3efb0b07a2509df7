"""Records what a rank allocates during its steps: in a dry run, or while really computing."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from megatron_mux import megatron_core
from megatron_mux.adapters.tensors import blank
from megatron_mux.backbone.model import load_stages
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.fake_world import fake_rank
from megatron_mux.dry_run.real_host import read_fake_value
from megatron_mux.dry_run.run_spec import JOINS, STEP, Recording, RunSpec, TaskRecords
from megatron_mux.dry_run.stand_ins import LengthsOnlyDataset
from megatron_mux.dry_run.tracker import StepTracker
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.memory.fake_gpu.recorder import Answer, Recorder
from megatron_mux.memory.fake_gpu.step_position import INPUTS, JOIN, StepPosition
from megatron_mux.memory.kernel_scratch import scratch_of
from megatron_mux.runtime import Parallel
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec

Around = Callable[[], contextlib.AbstractContextManager[Any]]


def import_engine() -> None:
    """Import what the engine imports lazily, so that forked processes share it."""
    from transformers.optimization import get_scheduler  # noqa: F401

    with megatron_core.quiet():
        import megatron.core.models.gpt  # noqa: F401


def import_all(run: RunSpec) -> None:
    """Import the engine, and what reading this run's tasks and config imports.

    Raises:
        UserError: The backbone's config is invalid.
    """
    import_engine()
    for one in run.tasks:
        TaskSpec.model_validate(one.task)
    read_info(run.config, run.quantise)


def execute_dry_run(run: RunSpec, rank: int, around: Around = contextlib.nullcontext) -> Recording:
    """Record a rank's steps without computing them. Call it once in a process of its own: see `process`.

    Args:
        around: Makes a context that each step, or all rolling ones together, run in.

    Raises:
        UserError: The backbone cannot be divided so, or a task does not fit it.
        NoFakeGpu: This process cannot have a fake GPU.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "config.json").write_text(json.dumps(run.config))
        parallel, host = stack.enter_context(
            fake_rank(
                rank,
                run.world,
                run.device,
                run.gpu,
                run.tensor,
                run.plan.ranks,
                run.sequence_parallel,
                run.expert,
                run.expert_tensor,
                run.placement,
                run.access,
            )
        )
        recording = record_steps(run, directory, parallel, read_fake_value, around)
        return replace(recording, communicators=len(host.groups))


def record_steps(
    run: RunSpec,
    directory: Path,
    parallel: Parallel,
    answer: Answer | None,
    around: Around = contextlib.nullcontext,
) -> Recording:
    """Record a rank while it loads, registers, steps and evaluates as a training process does. All tokens are equal.

    Scratch that CUDA kernels allocate is added for a fake GPU only.

    Args:
        run: Its number of ranks is the world size.
        directory: The backbone; without weights if they are fake.
        answer: Replaces values read from fake tensors; None: nothing is fake.
    """
    plan = run.plan
    place = StepPosition()
    scratch = scratch_of if run.device == "cuda" else None
    recorder = Recorder(place, parallel.device.type, 0, answer, scratch)
    watch = StepTracker(place, recorder)
    parallel = replace(parallel, heartbeat=watch)
    with recorder:
        stages = load_stages(
            directory,
            parallel,
            getattr(torch, run.dtype),
            run.recompute,
            plan.split or None,
            run.residence,
            config_only=answer is not None,
            placement=run.placement,
            quantise=run.quantise,
        )
        watch.follow(stages)
        recorder.vocabulary = stages[0].shape.padded_vocab // parallel.tp_size
        place.enter(JOIN)
        engine = Engine(stages, parallel, Planning("auto", plan.stages, given=plan))
        watch.follow_adapters(engine.adapters)
        watch.follow_transfers(engine.communicator)
        watch.follow_sums(engine)
        for one in run.tasks:
            watch.mark(JOINS)
            engine.register_tasks([_task(one, stages[0].shape)])
        watch.label(engine)
        _steps(engine, run, place, watch, around)
        if names := [one.name for one in run.tasks if one.held_out]:
            watch.within = f"the evaluation of {', '.join(names)}"
            engine.evaluate_together(names)
        # Between steps ranks compare notes in the group of all of them, whose communicator takes memory, too.
        parallel.total([False])
        return Recording(recorder.done(), tuple(watch.marks))


def _steps(engine: Engine, run: RunSpec, place: StepPosition, watch: StepTracker, around: Around) -> None:
    left = run.steps
    while left:
        place.enter(INPUTS)
        watch.mark(STEP)
        with around():
            left -= len(engine.steps(left if run.rolling else 1))


def _task(one: TaskRecords, shape: BackboneShape) -> Task:
    held_out = LengthsOnlyDataset(one.held_out, one.held_out_labels) if one.held_out else None
    spec, initial = TaskSpec.model_validate(one.task), None
    if spec.starts_from_reference:
        initial = blank(spec.adapter.tensors(shape))
    return Task(
        spec,
        cast(TaskDataset, LengthsOnlyDataset(one.lengths, one.labels)),
        cast(TaskDataset | None, held_out),
        initial,
    )
