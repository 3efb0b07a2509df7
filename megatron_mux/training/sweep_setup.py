"""Sweeps before a run: their scheduler, and the configurations and the metric of a run that is continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.engine import Task
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


def check_comparisons(file: TaskFile, tasks: Sequence[Task]) -> None:
    """Refuse a scheduler that would compare nothing, where only the data tell how many steps a configuration has.

    Raises:
        UserError: Says it once for each sweep.
    """
    problems: list[str] = []
    scheduler = file.scheduler
    for sweep in file.sweeps.values() if scheduler is not None else ():
        assert scheduler is not None
        opened = [task for task in tasks if task.spec.name in sweep.configurations]
        texts = [scheduler.problem_of_steps(own.spec, own.spec.total_steps(len(own.data))) for own in opened]
        problems += dict.fromkeys(f"task {sweep.name!r}: {text}" for text in texts if text)
    if problems:
        raise UserError(*problems)


def with_saved_trials(file: TaskFile, manifest: Manifest | None) -> TaskFile:
    """A task file as the run that is continued has it: with the configurations that samplers chose, and its metric.

    Refused configurations stay in their sweeps, since what a sampler chooses depends on them, and are no tasks.

    Raises:
        UserError: What is chosen from has changed, so that some of them could not be chosen now; or the metric has.
    """
    if manifest is None:
        return file
    sweeps, tasks = dict(file.sweeps), list(file.tasks)
    for sweep in file.sweeps.values():
        saved = {
            entry.name: entry
            for entry in manifest.tasks
            if sweep.sampler is not None and entry.configuration.sweep == sweep.name
        }
        if not saved:
            continue
        for name, entry in saved.items():
            settings = entry.configuration.settings
            if settings.keys() != sweep.space.keys() or not all(
                contains(sweep.space[key], value) for key, value in settings.items()
            ):
                raise UserError(
                    f"sweep of {sweep.name}: {name} of the run that is continued is not of its values: set them back, "
                    "or give the task a new name"
                )
        chosen = {name: entry.configuration.settings for name, entry in saved.items()}
        sweeps[sweep.name] = replace(sweep, configurations=chosen)
        tasks = [task for task in tasks if task.name not in sweep.configurations]
        tasks += [configuration(sweep, *own) for own in chosen.items() if saved[own[0]].status != "refused"]
    scheduler = _with_saved_metric(
        file.scheduler, [e for e in manifest.tasks if e.configuration.sweep in sweeps]
    )
    return replace(file, sweeps=sweeps, tasks=tasks, scheduler=scheduler)


def _with_saved_metric(spec: SchedulerSpec | None, saved: Sequence[SavedTask]) -> SchedulerSpec | None:
    """The scheduler of a run that is continued: figures of saved configurations are of one metric.

    Args:
        spec: As the file has it.
        saved: Configurations of its sweeps.

    Raises:
        UserError: It names another metric than the saved one.
    """
    before = next((entry.configuration for entry in saved if entry.configuration.figure), None)
    if before is None:
        return spec
    then = SchedulerSpec(type="none", metric=f"eval_{before.figure}", mode=before.mode)
    if spec is None or (spec.type == "none" and not spec.model_fields_set & {"metric", "mode"}):
        return then
    if (spec.figure, spec.is_greater_better) != (then.figure, then.is_greater_better):
        names = [f"eval_{own.figure} ({'max' if own.is_greater_better else 'min'})" for own in (then, spec)]
        raise UserError(
            f"scheduler.metric: the run that is continued compares by {names[0]}, not by {names[1]}: set metric and "
            "mode back, or begin a new run"
        )
    return spec
