"""Attaches tasks: the adapter, its optimizer, and what else the task needs."""

from __future__ import annotations

from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.data.sampler import Sampler
from megatron_mux.engine.extensions import extensions_of, state_of
from megatron_mux.engine.optimize import TaskOptimizer
from megatron_mux.engine.task_state import Task, TaskState
from megatron_mux.fusion.planner.load import TaskLoad


def attach(adapters: AdapterSet, task: Task, load: TaskLoad) -> TaskState:
    """Attach a task's adapter and make its optimizer, or raise and change nothing.

    Args:
        adapters: Where to.
        load: What the planner knows of it.

    Raises:
        UserError: The adapter does not match the task or the backbone, or its checkpoint cannot be read.
        torch.OutOfMemoryError: There is no memory for it on this rank.
    """
    spec, data = task.spec, task.data
    seed, together = spec.training.seed, spec.training.sequences_per_record
    sampler = Sampler(len(data), spec.sequences_per_step, seed, spec.data.shuffle, together)
    total = spec.total_steps(len(data))
    snapshot = None if task.resume is None else task.resume()
    adapter = adapters.add(spec, total, task.initial if snapshot is None else snapshot.adapter)
    try:
        optimizer = TaskOptimizer(adapter, spec.training, total, task.lengths)
        state = state_of(spec)(task, adapter, optimizer, sampler, load, total)
        state.attach_more(adapters)
        state.extensions = extensions_of(state, adapters.host.parallel)
        if snapshot is not None:
            state.resume(snapshot)
    except BaseException:
        detach(adapters, spec.name)
        raise
    return state


def detach(adapters: AdapterSet, name: str) -> None:
    """Detach a task's adapter, if it has one, and what `TaskState.attach_more` attached: under its name and an `@`."""
    for task_name in tuple(adapters.tasks):
        if task_name.partition("@")[0] == name:
            adapters.remove(task_name)
