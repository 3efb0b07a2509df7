"""The files of a run's saves: which manifests there are, which checkpoints they name, and which may be dropped."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_mux.errors import UserError
from megatron_mux.files import replace_directory, sync_directory, write

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAINING_STATE = "training_state.safetensors"
BEST = "best"
"""The directory of a task's best adapter, beside its checkpoints."""
MANIFESTS = "manifests"
RESULTS, CURVES = "results.csv", "curves.svg"
"""Of sweeps: a line for each configuration, best first; their training and evaluation, by steps."""
DECISIONS = "sweep.jsonl"
"""Which configurations stopped, went on or began, when and why."""


def manifests(directory: Path) -> list[tuple[int, Path]]:
    """Every manifest with its number; a file with any other name is not ours, and does not count."""
    found = []
    for path in (directory / MANIFESTS).glob("manifest-*.json"):
        match = re.fullmatch(r"manifest-([0-9]{8,})\.json", path.name)
        if match is not None and path.name == manifest_name(int(match[1])):
            found.append((int(match[1]), path))
    return found


def run_of_task(directory: Path) -> Path | None:
    """The run that a task's directory belongs to; None if it is not a task's."""
    run = directory.absolute().parent
    is_written = (directory / "metrics.jsonl").exists() or any(directory.glob("checkpoint-*"))
    return run if is_written and manifests(run) else None


def manifest_name(number: int) -> str:
    """The file name of a manifest."""
    return f"manifest-{number:08d}.json"


def newest_steps(directory: Path, name: str, count: int, owner: str = "") -> list[int]:
    """Steps of a task's checkpoints that the newest `count` saves name; damaged ones are passed over."""
    steps: list[int] = []
    for _, path in sorted(manifests(directory / owner), reverse=True):
        try:
            tasks = json.loads(path.read_text())["tasks"]
            steps += [task["step"] for task in tasks if task["name"] == name and task["checkpoint"]]
        except (ValueError, KeyError, TypeError):
            continue
    return steps[:count]


def find_adapter(directory: str | Path, say: Callable[[str], None]) -> Path:
    """The adapter that a directory stands for.

    Args:
        directory: Of an adapter, which is returned; of a task, whose newest checkpoint is; or of a run with one task.
            Any other directory is returned as it is.
        say: Told which checkpoint is taken.

    Raises:
        UserError: The run has several tasks, or there is no such directory.
    """
    directory = Path(directory)
    if not directory.exists():
        raise UserError(f"{directory}: no such directory: give that of an adapter, a task or a run")
    if (directory / ADAPTER_CONFIG).is_file():
        return directory
    newest = _newest_of_task(directory)
    if newest is None and directory.is_dir():
        found = {
            path.name: adapter for path in sorted(directory.iterdir()) if (adapter := _newest_of_task(path))
        }
        if len(found) > 1:
            choices = ", ".join(str(directory / name) for name in found)
            raise UserError(f"{directory}: is a run of several tasks: choose one of {choices}")
        newest = next(iter(found.values()), None)
    if newest is None:
        return directory
    say(f"{directory}: taking {newest}")
    return newest


def _newest_of_task(directory: Path) -> Path | None:
    """The checkpoint that the newest save names, else the one of most steps; None if it has no checkpoint."""
    steps = {
        int(path.name.rpartition("-")[2]): path
        for path in directory.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-[0-9]+", path.name) and (path / ADAPTER_CONFIG).is_file()
    }
    run, name = directory.absolute().parent, directory.name
    named = [
        *newest_steps(run, name, 1, owner=name),
        *newest_steps(run, name, 1),
        *sorted(steps, reverse=True),
    ]
    return next((steps[step] for step in named if step in steps), None)


def refuse_used(directory: Path, owner: str = "") -> None:
    """Refuse to save into a run's directory that is not being continued; `owner` as for `checkpoint.save`.

    Raises:
        UserError: `directory` holds checkpoints already.
    """
    if manifests(directory / owner):
        raise UserError(
            f"--save {directory}: holds checkpoints of {owner or 'a run'} already: continue it with "
            f"--load {directory}, or choose another directory."
        )
    # Runs of the other kind name checkpoints alike.
    if manifests(directory) if owner else any(directory.glob(f"*/{MANIFESTS}/manifest-*.json")):
        raise UserError(f"--save {directory}: holds runs of other tasks: choose another directory.")


def drop_after(directory: Path, number: int, owner: str = "") -> None:
    """Forget the saves after a number: what was done after it will be done again. Their checkpoints stay."""
    for found, path in manifests(directory / owner):
        if found > number:
            path.unlink()


def named_by(task: Mapping[str, Any]) -> set[str]:
    """The checkpoints that a manifest's entry of a task names."""
    return {task["checkpoint"], task["good"], task.get("best", {}).get("checkpoint", "")} - {""}


def limit_checkpoints(directory: Path, limits: Mapping[str, int], named: Collection[str], owner: str) -> None:
    """Drop the oldest checkpoints of tasks that limit their number; saves that name them are passed over for that task.

    Args:
        directory: The run's.
        limits: How many to keep, by task.
        named: Checkpoints that the newest save names: they stay.
        owner: See `checkpoint.save`.
    """
    dropped: set[str] = set()
    for name, limit in limits.items():
        found = sorted(
            (int(path.name.rpartition("-")[2]), f"{name}/{path.name}")
            for path in (directory / name).glob("checkpoint-*")
            if re.fullmatch(r"checkpoint-[0-9]+", path.name)
        )
        dropped |= {checkpoint for _, checkpoint in found[:-limit]} - set(named)
    for checkpoint in dropped:
        shutil.rmtree(directory / checkpoint, ignore_errors=True)


def write_best(directory: Path, best: Mapping[str, str]) -> None:
    """Let `DIR/<task>/best` hold the adapter of the best evaluation, for `peft` to load.

    Args:
        directory: The run's.
        best: Task to its best checkpoint.
    """
    for name, checkpoint in best.items():
        source, final = directory / checkpoint, directory / name / BEST
        weights = final / ADAPTER_WEIGHTS
        if weights.exists() and os.path.samefile(weights, source / ADAPTER_WEIGHTS):
            continue
        partial = final.with_name(f".partial-{BEST}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in source.iterdir():
            if path.name != TRAINING_STATE:
                try:
                    os.link(path, partial / path.name)
                except OSError:  # a file system without links
                    write(partial / path.name, path.read_bytes())
        sync_directory(partial)
        replace_directory(partial, final)


def what_is_wrong(path: Path) -> str:
    """Whether a file of tensors is whole, by its header and its size: no tensor is read. Empty if it is."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return "is not there"
    try:
        with safe_open(path, framework="pt"):
            return ""
    except (OSError, SafetensorError) as error:
        return f"cannot be read ({error})"


def prune(directory: Path, keep: int, owner: str) -> None:
    """Drop what no task needs to go back by `keep` of its checkpoints, or to be complete if it is over.

    A save names the last checkpoints of tasks that it did not write, so several saves may name the same one. Kept are
    each task's newest checkpoints and the saves that name them first.
    """
    wanted: dict[str, list[str]] = {}
    over: set[str] = set()
    kept: set[str] = set()
    dropped: set[str] = set()
    for nth, (_, path) in enumerate(sorted(manifests(directory / owner), reverse=True)):
        tasks = _tasks_of(path)
        if tasks is None:
            continue  # damaged: it is no save, and says nothing of what may be dropped
        needed = not wanted
        for task in tasks:
            own = wanted.setdefault(task["name"], [])
            over |= (
                {task["name"]}
                if not nth and task.get("status") in ("finished", "failed", "removed")
                else set()
            )
            if task["checkpoint"] not in own and len(own) < (1 if task["name"] in over else keep):
                own.append(task["checkpoint"])
                kept |= named_by(task)
                needed = True
            dropped |= named_by(task)
        if not needed:
            path.unlink()
    for checkpoint in dropped - kept:
        if not os.path.isabs(checkpoint):  # another run's is not ours to delete
            shutil.rmtree(directory / checkpoint, ignore_errors=True)


def _tasks_of(manifest: Path) -> list[dict[str, Any]] | None:
    """The tasks of a manifest; None if it is damaged."""
    status = manifest.stat()
    return _read_tasks(manifest, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=4096)  # every save looks at all of them
def _read_tasks(manifest: Path, _: tuple[int, int]) -> list[dict[str, Any]] | None:
    try:
        tasks = json.loads(manifest.read_text())["tasks"]
        names = ("name", "checkpoint", "good")
        more = ("status", "best")
        return [{key: task[key] for key in (*names, *(k for k in more if k in task))} for task in tasks]
    except (ValueError, KeyError, TypeError):
        return None
