"""Saves of a run: per-task checkpoints that `peft` loads, and one atomic manifest that names them.

A checkpoint is written beside its final name, flushed to disk and renamed; the manifest that names it comes last.
So whatever kills the run, the newest manifest names complete checkpoints only, and `load` finds it. Runs of one task
each may share a directory: `owner` is then that task, and the manifests are in its directory.

Whether a checkpoint is good shows one step later: the loss of step s + 1 is the first that is measured with the adapter
that update s left, and `checkpoint-s` holds that adapter. It is good once that loss and its gradient were finite and
the loss in its usual range (see `engine.loss_health`). A manifest names each task's newest checkpoint, from which a run
continues, and its last good one, which stays for as long as a manifest names it: it is kept if the task diverges.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mux import model_card
from megatron_mux.adapters.peft_format import CONFIG as ADAPTER_CONFIG
from megatron_mux.adapters.peft_format import WEIGHTS as ADAPTER_WEIGHTS
from megatron_mux.engine import BestEvaluation, LossHealth, Snapshot
from megatron_mux.errors import UserError
from megatron_mux.files import Pace, replace_directory, sync_directory, write, write_atomically
from megatron_mux.fusion.plan import Plan
from megatron_mux.saved_files import (
    MANIFESTS,
    TRAINING_STATE,
    limit_checkpoints,
    manifest_name,
    manifests,
    named_by,
    prune,
    what_is_wrong,
    write_best,
)
from megatron_mux.sweep.saved import SavedConfiguration
from megatron_mux.tasks.life import TaskLife
from megatron_mux.tensor_file import write_tensors

_FORMAT = 2


@dataclass
class SavedTask:
    """One task in a manifest.

    Attributes:
        step: Optimizer steps its checkpoint holds.
        status: `running`, `paused`, `pruned`, `finished`, `failed`, `refused` or `removed` at that time.
        reason: Why it failed, was refused or pruned, else empty.
        checkpoint: Directory of its checkpoint, relative to the run's; empty if it has none yet.
        spec: The task as it was given, as plain data.
        data: Fingerprint of its training records.
        good: Directory of its last good checkpoint: `checkpoint` or one before it; empty if none is known to be good.
        health: Its losses, by which a diverging one is recognised.
        best: Its best evaluation so far, if it compares them.
        reference: Fingerprint of the adapter that a preference loss compares with; empty if it is the backbone.
        lengths: See `engine.Task`.
        configuration: What makes it one of a sweep.
    """

    name: str
    step: int
    status: str
    reason: str
    checkpoint: str
    spec: dict[str, Any]
    data: str
    good: str = ""
    health: LossHealth = field(default_factory=LossHealth)
    best: BestEvaluation = field(default_factory=BestEvaluation)
    reference: str = ""
    lengths: tuple[tuple[int, int], ...] = ()
    configuration: SavedConfiguration = field(default_factory=SavedConfiguration)

    def follow(self, life: TaskLife) -> None:
        """Take over what the task's life says of its status."""
        self.status = life.saved_status(self.status)
        self.reason = life.reason if life.has_begun else self.reason

    def note(self, step: int, loss: float) -> None:
        """Record a step with a finite gradient and its loss; both judge the adapter that the step before it left."""
        self.health.note(loss)
        if self.health.good and self.checkpoint and self.step == step - 1:
            self.good = self.checkpoint

    @property
    def is_over(self) -> bool:
        """Whether it has finished or failed."""
        return self.status in ("finished", "failed")

    def fall_back(self) -> None:
        """Name the last good checkpoint instead of the newest, if there is one."""
        if self.good:
            self.checkpoint, self.step = self.good, int(self.good.rpartition("-")[2])


@dataclass
class Manifest:
    """One save: every task's checkpoint and the plan.

    Attributes:
        number: Saves of a run count from 1.
        backbone: Fingerprint of the backbone.
        tasks: In the order they were registered.
        format: Version of this file's layout.
        precision: In what the run computed, by `MuxArguments.precision`; empty if the manifest does not say.
        steps: Steps that the run has done.
    """

    number: int
    backbone: str
    tasks: list[SavedTask]
    plan: dict[str, Any]
    format: int = _FORMAT
    precision: str = ""
    steps: int = 0


@dataclass
class TaskToSave:
    """One task's part of a save.

    Attributes:
        entry: Its line in the manifest; `checkpoint` is filled in by `save`.
        snapshot: Its state, or None to go on naming the checkpoint that `entry` names.
        config: Content of `adapter_config.json`.
        records: Number of its training records; None: not known.
        held_out: Number and fingerprint of its evaluation records; None: it has none.
        header: Entries of the header of the adapter's file.
        card: Content of the adapter's `README.md`; empty: it gets none.
        limit: How many of its checkpoints to keep, besides those that this save names; None: all.
    """

    entry: SavedTask
    snapshot: Snapshot | None = None
    config: dict[str, Any] = field(default_factory=dict)
    records: int | None = None
    held_out: tuple[int, str] | None = None
    header: dict[str, str] = field(default_factory=dict)
    card: str = ""
    limit: int | None = None


def checkpoint_of(name: str, step: int) -> str:
    """The directory of a task's checkpoint, relative to the run's."""
    return f"{name}/checkpoint-{step}"


def save(
    directory: Path,
    states: Iterable[TaskToSave],
    plan: Plan,
    backbone: str,
    keep: int | None = None,
    pace: Pace | None = None,
    precision: str = "",
    owner: str = "",
    steps: int = 0,
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write checkpoints and then the manifest that names them, and return it. Called on rank 0 only.

    Args:
        directory: The run's directory.
        states: Every task of the run; each is written before the next one is asked for, and its snapshot dropped.
        plan: The plan in force.
        backbone: Fingerprint of the backbone.
        keep: Checkpoints of each task to keep, with the manifests that name them first; None keeps all.
        pace: How fast to write.
        precision: See `Manifest`.
        owner: The one task of the run, if other runs share the directory.
        steps: Steps that the run has done.
        check: Raises a `UserError` once another process writes there; called before anything is replaced.

    Raises:
        UserError: The disk is full or not writable; everything saved before stays as it was. Or `check` says so.
    """
    check()
    try:
        entries, limits = list[SavedTask](), dict[str, int]()
        for state in states:
            if state.snapshot is not None:
                state.entry.checkpoint = _write_checkpoint(directory, state, pace, check)
                state.snapshot = None
            entries.append(state.entry)
            if state.limit is not None:
                limits[state.entry.name] = state.limit
        number = 1 + max((m for m, _ in manifests(directory / owner)), default=0)
        manifest = Manifest(number, backbone, entries, plan.to_json(), precision=precision, steps=steps)
        named = _write_manifest(directory / owner, manifest, check)
        check()
        best = {entry.name: entry.best.checkpoint for entry in entries if entry.best.checkpoint}
        write_best(directory, best)
        if keep is not None:
            prune(directory, keep, owner)
        limit_checkpoints(directory, limits, named, owner)
    except OSError as error:
        check()  # whoever took the directory over cleared away what this save had begun
        raise UserError(
            f"--save {directory}: could not save: {error.strerror or error} ({error.filename or directory}). What was "
            "saved before is complete; make room or choose another directory, and go on with --load."
        ) from error
    return manifest


def _write_manifest(directory: Path, manifest: Manifest, check: Callable[[], None]) -> set[str]:
    """Write a manifest and its plan; returns the checkpoints that it names."""
    value = asdict(manifest)
    for task in [task for task in value["tasks"] if not task["configuration"]["sweep"]]:
        del task["configuration"]
    text = json.dumps(value, indent=1)
    write_atomically(directory / MANIFESTS / manifest_name(manifest.number), text, check=check)
    write_atomically(directory / "plan.json", json.dumps(manifest.plan, indent=2) + "\n", check=check)
    return {checkpoint for task in value["tasks"] for checkpoint in named_by(task)}


def _write_checkpoint(
    directory: Path,
    state: TaskToSave,
    pace: Pace | None,
    check: Callable[[], None],
) -> str:
    entry, snapshot = state.entry, state.snapshot
    assert snapshot is not None
    relative = checkpoint_of(entry.name, entry.step)
    final = directory / relative
    partial = directory / entry.name / f".partial-checkpoint-{entry.step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(partial / ADAPTER_CONFIG, (json.dumps(state.config, indent=2, sort_keys=True) + "\n").encode())
        if state.card:
            write(partial / model_card.NAME, state.card.encode())
        write_tensors(partial / ADAPTER_WEIGHTS, snapshot.adapter, state.header, pace)
        training = {
            f"{name}.{key}": t for key, named in snapshot.moments.items() for name, t in named.items()
        }
        training |= {f"extra.{key}": t for key, t in snapshot.extra.items()}
        write_tensors(partial / TRAINING_STATE, training, {"step": str(snapshot.step)}, pace)
        sync_directory(partial)
        check()
        # What it replaces was left by a run that was killed before its manifest, or by steps that are done again.
        replace_directory(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return relative


def load(
    directory: Path,
    backbone: str,
    say: Callable[[str], None] = lambda text: None,
    owner: str = "",
    before: int | None = None,
) -> Manifest | None:
    """The state of a run by its newest saves.

    Args:
        directory: The run's directory; may be empty or missing.
        backbone: Fingerprint of the backbone that is to continue it.
        say: Told of newer saves that are passed over, and why.
        owner: See `save`.
        before: Pass over saves of this number and later ones.

    Returns:
        The manifest, with each task as of its newest save that is whole; None if nothing was saved there.

    Raises:
        UserError: The run was made on another backbone, by an unknown format, or none of its saves is complete.
    """
    try:
        manifest, notes = _newest(directory, owner, before)
    except OSError as error:
        raise UserError(f"--load {directory}: cannot be read: {error.strerror or error}") from error
    if manifest is None and notes:
        others = f" (nor can the {len(notes) - 1} before it)" if len(notes) > 1 else ""
        raise UserError(
            f"--load {directory}: the newest save cannot be continued{others}: {notes[0]}: put the file back as "
            "it was, or start anew with another --save"
        )
    if manifest is not None and manifest.backbone != backbone:
        raise UserError(
            f"--load {directory}: these checkpoints were made on another backbone (by its config.json or by samples of "
            "its weights): give the --backbone they were trained on, or start anew with another --save; "
            "adapter_name_or_path then starts a task from a checkpoint's adapter."
        )
    for note in notes:
        say(f"--load {directory}: {note}")
    return manifest


class _IncompleteError(Exception):
    """A manifest that cannot be continued; says its file and what is wrong."""


def _newest(directory: Path, owner: str, before: int | None) -> tuple[Manifest | None, list[str]]:
    """What the newest saves say, each task by its newest one whose checkpoint is whole.

    With a manifest comes what is not as in the newest save; with None, what is wrong with each save.
    """
    problems, notes = list[str](), list[str]()
    base: Manifest | None = None
    damaged: dict[str, str] = {}
    for number, path in sorted(manifests(directory / owner), reverse=True):
        if before is not None and number >= before:
            continue
        try:
            manifest = _read_manifest(path)
        except _IncompleteError as error:
            problems.append(str(error))
            continue
        if base is None:
            damaged = {
                t.name: wrong for t in manifest.tasks if (wrong := _what_is_missing(directory, path, t))
            }
            if damaged and not any(
                t.checkpoint and t.name not in damaged for t in manifest.tasks if not t.is_over
            ):
                problems.append(next(iter(damaged.values())))
                damaged = {}
                continue
            base = manifest
            notes = [f"going back to save {number}, since {problem}" for problem in problems]
        else:
            entries = {t.name: t for t in manifest.tasks if not _what_is_missing(directory, path, t)}
            for task in [t for t in base.tasks if t.name in damaged and t.name in entries]:
                notes.append(f"{task.name} goes back to save {number}, since {damaged.pop(task.name)}")
                base.tasks[base.tasks.index(task)] = entries[task.name]
        if not damaged:
            return base, notes
    return None, [*problems, *damaged.values()]


def _read_manifest(path: Path) -> Manifest:
    try:
        value = json.loads(path.read_text())
        if value["format"] != _FORMAT:
            raise UserError(f"{path}: written by another version of megatron-mux (format {value['format']})")
        value["tasks"] = [
            SavedTask(
                **{
                    **task,
                    "health": LossHealth(**task["health"]),
                    "best": BestEvaluation(**task.get("best", {})),
                    "lengths": tuple((done, planned) for done, planned in task.get("lengths", ())),
                    "configuration": SavedConfiguration.read(task.get("configuration", {})),
                }
            )
            for task in value["tasks"]
        ]
        return Manifest(**value)
    except (ValueError, KeyError, TypeError) as error:
        raise _IncompleteError(f"{path.name} is damaged ({error})") from error


def _what_is_missing(directory: Path, manifest: Path, task: SavedTask) -> str:
    """Which file a manifest's task cannot be continued without, if any; drops the names of others that are damaged."""
    # Of a task that is over nothing but the adapter is ever read.
    for name in (ADAPTER_WEIGHTS,) if task.is_over else (ADAPTER_WEIGHTS, TRAINING_STATE):
        if task.checkpoint and (wrong := what_is_wrong(directory / task.checkpoint / name)):
            return f"{manifest.name} names {task.checkpoint}/{name}, which {wrong}"
    if task.good and what_is_wrong(directory / task.good / ADAPTER_WEIGHTS):
        task.good = ""
    if task.best.checkpoint and what_is_wrong(directory / task.best.checkpoint / ADAPTER_WEIGHTS):
        task.best.checkpoint = ""
    return ""


def load_task(directory: Path, entry: SavedTask) -> Snapshot:
    """Read a task's checkpoint.

    Raises:
        UserError: A file is missing or unreadable.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = directory / entry.checkpoint
    try:
        adapter = load_file(folder / ADAPTER_WEIGHTS)
        state = load_file(folder / TRAINING_STATE)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the checkpoint cannot be read: {error}") from error
    moments: dict[str, dict[str, Tensor]] = {}
    extra: dict[str, Tensor] = {}
    for name, tensor in state.items():
        kind, key = name.split(".", 1)
        if kind == "extra":
            extra[key] = tensor
        else:
            moments.setdefault(key, {})[kind] = tensor
    return Snapshot(entry.step, adapter, moments, extra)
