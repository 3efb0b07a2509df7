"""Makes the loop of a run: its callbacks, its tasks, and what it continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from megatron_mux.arguments import MuxArguments
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest
from megatron_mux.data.dataset import DataFiles
from megatron_mux.directory_lock import DirectoryLock
from megatron_mux.engine import Engine, Planning
from megatron_mux.hub_cache import model_id
from megatron_mux.report import Reporter
from megatron_mux.tasks import TaskFile
from megatron_mux.tasks.life import TaskLives
from megatron_mux.training.best import BestCheckpointTracker
from megatron_mux.training.callback import Callback
from megatron_mux.training.callbacks.evaluations import Evaluations
from megatron_mux.training.callbacks.pictures import Pictures
from megatron_mux.training.callbacks.saves import Saves, SaveSchedule
from megatron_mux.training.callbacks.sweeps import Sweeps
from megatron_mux.training.commands import CommandSource, InTurn, OnlyDrain, SharedCommands
from megatron_mux.training.exits import Exits
from megatron_mux.training.garbage import FrozenObjects
from megatron_mux.training.joining import WatchedDirectory
from megatron_mux.training.loop import Loop
from megatron_mux.training.saving import Saver
from megatron_mux.training.step_loop import StepLoop
from megatron_mux.training.task_registry import TaskRegistry


def make_loop(
    arguments: MuxArguments,
    engine: Engine,
    reporter: Reporter,
    info: BackboneInfo,
    files: DataFiles,
    manifest: Manifest | None = None,
    watch: Callback | None = None,
    lock: DirectoryLock | None = None,
    began: float | None = None,
    lives: TaskLives | None = None,
    commands: CommandSource | None = None,
    callbacks: Sequence[Callback] = (),
    file: TaskFile | None = None,
) -> Loop:
    """Make the loop of a run. Every rank calls it.

    Args:
        arguments: The command line.
        engine: Trains the tasks.
        reporter: Told every step.
        info: The backbone, for tasks that join.
        files: Opens the data of tasks that join.
        manifest: The save to continue from, if any.
        watch: Counts which experts steps select; None: nobody asked.
        lock: On the directory of `--save`; None on ranks that do not write there.
        began: When the run began, by `time.monotonic`; None: now.
        lives: Those of the tasks that the run begins with, as far as they are known.
        commands: What else tells the run what to do, beside the watched directory. Every rank gives a source, and that
            of the first rank is asked.
        callbacks: Others than those that `arguments` ask for; they are called after these.
        file: The task file, with the sweeps that it asks for.
    """
    parallel, save, watched = engine.parallel, arguments.save, arguments.mux_watch
    sources: list[CommandSource] = [] if watched is None else [WatchedDirectory(watched)]
    sources += [] if commands is None else [commands]
    continued = arguments.load if manifest is not None else None
    registry = TaskRegistry(engine, parallel, reporter, info, files, [], continued, save_directory=save)
    registry.keeps_pauses = commands is not None  # nothing in a watched directory resumes a task
    registry.lives = registry.lives if lives is None else lives
    if save is not None and parallel.rank == 0 and (arguments.load == save or manifest is None):
        # A run that died before its first save leaves lines, too. Not before the tasks are accepted: a refused run
        # leaves everything as it is.
        registry.accepted = partial(reporter.continue_metrics, save, manifest)
    step_loop = StepLoop(arguments.mux_rolling, watching=bool(sources))
    steps_before = manifest.steps if manifest is not None else 0
    registry.callbacks += [] if watch is None else [watch]
    registry.callbacks += _callbacks(arguments, registry, step_loop, steps_before, lock)
    sweeps = _sweeps(arguments, registry, file, lock)
    registry.callbacks += [*sweeps, *callbacks]
    if manifest is not None and continued is not None:
        registry.continue_from(manifest, continued, save)
        reporter.say(f"continuing from {continued} (save {manifest.number})")
        for change in changes_since(manifest, engine.planning, arguments.precision):
            reporter.say(change)
    for callback in registry.callbacks:
        callback.set_up(registry)
    source = InTurn([*sweeps, SharedCommands(sources, parallel) if sources else OnlyDrain()])
    began = time.monotonic() if began is None else began
    return Loop(arguments, registry, step_loop, source, _check_of(lock), manifest, began)


def _callbacks(
    arguments: MuxArguments,
    registry: TaskRegistry,
    step_loop: StepLoop,
    steps_before: int,
    lock: DirectoryLock | None,
) -> Iterator[Callback]:
    """Yield the callbacks that a run asks for, in their order."""
    engine, reporter, check = registry.engine, registry.reporter, _check_of(lock)
    if arguments.exit_interval is not None or arguments.exit_duration_in_mins is not None:
        yield Exits(arguments.exit_interval, arguments.exit_duration_in_mins, steps_before)
    yield Evaluations(registry, BestCheckpointTracker(registry.entries, reporter.say), check)
    yield SaveSchedule(registry, arguments.save_interval)
    if arguments.save is not None:
        saver = Saver(
            arguments.save,
            engine.backbone.info.fingerprint,
            arguments.mux_keep_checkpoints,
            arguments.mux_save_rate,
            registry.parallel,
            arguments.precision,
            reporter.owner,
            engine.backbone.info.shape.quantisation,
            lock,
        )
        yield saver
        yield Saves(registry, saver, arguments.backbone, step_loop, steps_before)
    yield Pictures(registry, step_loop, check)
    yield FrozenObjects()


def _sweeps(
    arguments: MuxArguments, registry: TaskRegistry, file: TaskFile | None, lock: DirectoryLock | None
) -> list[Sweeps]:
    """What runs the sweeps of a task file, if it has any."""
    if file is None or not file.sweeps:
        return []
    return [Sweeps(registry, file, model_id(arguments.backbone), arguments.save, _check_of(lock))]


def _check_of(lock: DirectoryLock | None) -> Callable[[], None]:
    """The check of a directory; nothing on a rank that writes to none."""
    return (lambda: None) if lock is None else lock.check


def changes_since(manifest: Manifest, planning: Planning, precision: str) -> Iterator[str]:
    """Yield what a run does otherwise than the one whose save it continues, so that results differ.

    Args:
        manifest: The save.
        planning: Of the run that continues it.
        precision: In what that run computes, see `MuxArguments.precision`.
    """
    before = manifest.plan
    split = tuple(before.get("split", ()))
    same = (before["policy"], before["stages"]) == (planning.policy, planning.stages)
    if not same or (split and split != tuple(planning.split)):
        yield (
            f"it was saved with policy {before['policy']} on {before['stages']} stage(s): going on with "
            f"{planning.policy} on {planning.stages} rounds differently"
        )
    if manifest.precision and manifest.precision != precision:
        yield (
            f"it was saved by a run in {manifest.precision}: going on in {precision} rounds differently "
            "(--mux-fp32, --mux-tf32 and --bf16 choose)"
        )
