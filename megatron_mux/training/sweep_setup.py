"""Sweeps before a run: their scheduler, and the configurations that a run which is continued had chosen."""

from __future__ import annotations

from dataclasses import replace

from megatron_mux.checkpoint import Manifest
from megatron_mux.errors import UserError
from megatron_mux.sweep.halving import Halving
from megatron_mux.sweep.median import MedianStopping
from megatron_mux.sweep.scheduler import Scheduler
from megatron_mux.tasks import TaskFile
from megatron_mux.tasks.files import configuration
from megatron_mux.tasks.scheduler import SchedulerSpec
from megatron_mux.tasks.sweep import contains


def make_scheduler(spec: SchedulerSpec | None) -> Scheduler | None:
    """What a task file asks for; None: every configuration trains in full."""
    if spec is None or spec.type == "none":
        return None
    if spec.type == "median":
        return MedianStopping(spec.min_steps or 1)
    assert spec.min_steps is not None
    return Halving(spec.min_steps, spec.factor)


def check_sweeps(file: TaskFile, saves: bool) -> None:
    """Refuse to stop configurations, or to sample them, in a run that saves nothing.

    Raises:
        UserError: Says what needs a directory.
    """
    if saves:
        return
    if make_scheduler(file.scheduler) is not None:
        raise UserError("scheduler: what it stops is kept on disk: use --save DIR")
    sampled = [sweep.name for sweep in file.sweeps.values() if sweep.sampler is not None]
    if sampled:
        raise UserError(f"sweep.sampler of {', '.join(sampled)}: trials are kept on disk: use --save DIR")


def with_saved_trials(file: TaskFile, manifest: Manifest | None) -> TaskFile:
    """A task file with the configurations that samplers have chosen in the run that is continued, and no others.

    Raises:
        UserError: What is chosen from has changed, so that some of them could not be chosen now.
    """
    sweeps, tasks = dict(file.sweeps), list(file.tasks)
    for sweep in file.sweeps.values():
        entries = manifest.tasks if manifest is not None and sweep.sampler is not None else ()
        saved = {
            entry.name: entry.configuration.settings
            for entry in entries
            if entry.configuration.sweep == sweep.name
        }
        if not saved:
            continue
        for name, settings in saved.items():
            if settings.keys() != sweep.space.keys() or not all(
                contains(sweep.space[key], value) for key, value in settings.items()
            ):
                raise UserError(
                    f"sweep of {sweep.name}: {name} of the run that is continued is not of its values: set them back, "
                    "or give the task a new name"
                )
        sweeps[sweep.name] = replace(sweep, configurations=saved)
        tasks = [task for task in tasks if task.name not in sweep.configurations]
        tasks += [configuration(sweep, *own) for own in saved.items()]
    return replace(file, sweeps=sweeps, tasks=tasks)
