"""A rank's steps, recorded: rehearsed without memory, or really computed."""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_mux import runtime
from megatron_mux.backbone.model import load_stages
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.engine import Engine, Planning, Task
from megatron_mux.memory.trace.device import DEVICE, fake_gpu, replaced
from megatron_mux.memory.trace.place import INPUTS, JOIN, Place
from megatron_mux.memory.trace.record import Answer, Recorder
from megatron_mux.memory.trace.scratch import scratch_of
from megatron_mux.rehearsal.depth import read_info
from megatron_mux.rehearsal.host import HostComputes, everyone_says_the_same, read_from_nothing
from megatron_mux.rehearsal.recording import STEP, Recording
from megatron_mux.rehearsal.records import AsGiven, LengthsAlone
from megatron_mux.rehearsal.setting import Cast, Setting
from megatron_mux.rehearsal.watch import Watch
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec


def import_all(setting: Setting) -> None:
    """Import what a rehearsal does only once it is needed: processes forked off then have it.

    Raises:
        UserError: The backbone's config is none.
    """
    from transformers.optimization import get_scheduler  # noqa: F401

    for one in setting.tasks:
        TaskSpec.model_validate(one.task)
    read_info(setting.config)


def rehearse(setting: Setting, rank: int) -> Recording:
    """A rank's steps without memory. Call it once in a process of its own: see `process`.

    Raises:
        UserError: The backbone cannot be divided so, or a task does not fit it.
        NoFakeGpu: This process cannot pretend to have a GPU.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=setting.world)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / "config.json").write_text(json.dumps(setting.config))
        stack.enter_context(_nothing_there(setting))
        parallel = runtime.initialize(
            setting.tensor, setting.plan.ranks, setting.sequence_parallel, device=_device(setting)
        )
        host = stack.enter_context(HostComputes())
        parallel = OthersSayTheSame(**vars(parallel))
        recording = _record(setting, directory, parallel, read_from_nothing)
        return replace(recording, communicators=len(host.groups))


class OthersSayTheSame(Parallel):
    """A place in a world of which no other rank is there: each would say what this one says."""

    def total(self, flags: Sequence[bool]) -> list[int]:
        """See `Parallel.total`."""
        super().total(flags)
        return [self.world_size * int(flag) for flag in flags]

    def most(self, values: Sequence[float]) -> list[float]:
        """See `Parallel.most`."""
        super().most(values)
        return list(values)


def count(setting: Setting, directory: Path, parallel: Parallel) -> Recording:
    """The same steps really computed on this rank: every rank calls it. Tokens are all the same.

    Args:
        setting: Of as many ranks as there are.
        directory: The backbone with its weights.
        parallel: Where this rank stands.
    """
    return _record(setting, directory, parallel, None)


def _record(setting: Setting, directory: Path, parallel: Parallel, answer: Answer | None) -> Recording:
    """Load, register, step and evaluate, as a training process does it; without weights if there is an answer for them.

    Kernels' own scratch is put in where the device is not there: on a CPU others are counted.
    """
    plan = setting.plan
    place = Place()
    scratch = scratch_of if setting.device == "cuda" else None
    recorder = Recorder(place, parallel.device.type, 0, answer, scratch)
    watch = Watch(place, recorder)
    parallel = replace(parallel, heartbeat=watch)
    with _collecting_nothing():
        with recorder:
            stages = load_stages(
                directory,
                parallel,
                getattr(torch, setting.dtype),
                setting.recompute,
                plan.split or None,
                setting.residence,
                absent=answer is not None,
            )
            watch.follow(stages)
            recorder.vocabulary = stages[0].shape.padded_vocab // parallel.tp_size
            place.enter(JOIN)
            engine = Engine(stages, parallel, Planning("auto", plan.stages, AsGiven(plan), given=plan))
            watch.follow_adapters(engine.adapters.host)
            engine.register_tasks([_task(one) for one in setting.tasks])
            watch.label(engine)
            _steps(engine, setting, place, watch)
            for one in setting.tasks:
                if one.held_out:
                    watch.within = f"the evaluation of {one.name}"
                    engine.evaluate(one.name)
        return Recording(recorder.done(), tuple(watch.marks))


def _steps(engine: Engine, setting: Setting, place: Place, watch: Watch) -> None:
    left = setting.steps
    while left:
        place.enter(INPUTS)
        watch.mark(STEP)
        left -= len(engine.steps(left if setting.rolling else 1))


def _task(one: Cast) -> Task:
    held_out = LengthsAlone(one.held_out, one.held_out_labels) if one.held_out else None
    return Task(
        TaskSpec.model_validate(one.task),
        cast(TaskDataset, LengthsAlone(one.lengths, one.labels)),
        cast(TaskDataset | None, held_out),
    )


def _device(setting: Setting) -> torch.device:
    return DEVICE if setting.device == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def _nothing_there(setting: Setting) -> Iterator[None]:
    """Within, tensors are fake, and other ranks say what this one says."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(dist, "all_gather_object", everyone_says_the_same))
        if setting.device == "cuda":
            stack.enter_context(fake_gpu(setting.gpu))
            stack.enter_context(replaced(torch.cuda, "current_device", lambda: DEVICE))
            stack.enter_context(replaced(torch.Tensor, "pin_memory", lambda tensor: tensor))
        else:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextlib.contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Without the garbage collector, which would free cycles at moments that depend on everything else."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
