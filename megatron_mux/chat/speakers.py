"""Which adapters take part in a conversation: PEFT directories, and tasks of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_mux import checkpoint
from megatron_mux.adapters.peft_format import CONFIG, WEIGHTS, read_adapter
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.errors import UserError
from megatron_mux.merging.provenance import Provenance, check_backbone
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.saved_files import run_of_task
from megatron_mux.tasks import TaskSpec, read_task

BACKBONE = "backbone"
"""Name of the backbone without an adapter."""


@dataclass(frozen=True)
class Speaker:
    """One who answers.

    Attributes:
        name: Its name in the conversation.
        spec: The adapter as a task; None: the backbone without one.
        tensors: Those of the adapter, by key.
    """

    name: str
    spec: TaskSpec | None = None
    tensors: dict[str, Tensor] | None = None


def speakers_of(
    info: BackboneInfo,
    adapters: Sequence[tuple[str, Path]],
    run: Path | None,
    tasks: Collection[str] | None,
    with_backbone: bool,
    warn: Callable[[str], None],
) -> list[Speaker]:
    """Read everyone who takes part.

    Args:
        info: The backbone.
        adapters: Names and directories of adapters in PEFT's format.
        run: Directory that `pretrain_mux.py --save` wrote.
        tasks: Those of the run's tasks that take part; None: all that have a checkpoint.
        with_backbone: Whether the backbone without an adapter takes part, too. It does where nobody else does.
        warn: Told of adapters that were trained on another backbone.

    Raises:
        UserError: With all problems: an adapter cannot be read or does not fit the backbone, or a name is taken.
    """
    found, problems = list(adapters), []
    if run is not None:
        try:
            found += _of_run(run, info, tasks)
        except UserError as error:
            problems += error.problems
    speakers = [Speaker(BACKBONE)] if with_backbone or not (found or problems) else []
    for name, directory in found:
        if any(other.name == name for other in speakers):
            problems.append(
                f"--adapter {name}={directory}: there is another adapter {name!r}: choose another name"
            )
            continue
        try:
            speakers.append(read_speaker(name, directory, info, warn))
        except UserError as error:
            problems += [f"adapter {name!r}: {problem.removeprefix('task: ')}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return speakers


def quantisation_of(run: Path) -> QuantMethod | None:
    """How a run quantised its backbone on load; None: it did not, or nothing is saved there."""
    saved = sorted(run.glob(f"*/checkpoint-*/{WEIGHTS}"))  # all of one backbone
    return Provenance.read(saved[0].parent).method if saved else None


def _of_run(run: Path, info: BackboneInfo, tasks: Collection[str] | None) -> list[tuple[str, Path]]:
    """The newest checkpoints of a run's tasks.

    Raises:
        UserError: The run was made on another backbone, nothing is saved there, or a task has no checkpoint.
    """
    try:
        manifest = checkpoint.load(run, info.fingerprint)
    except UserError as error:
        raise UserError(*(text.replace("--load", "--run") for text in error.problems)) from None
    if manifest is None:
        whole = run_of_task(run)
        advice = (
            "give a run's --save" if whole is None else f"it is a task's directory: give its run's, {whole}"
        )
        raise UserError(f"--run {run}: no run was saved there: {advice}")
    saved = {task.name: run / task.checkpoint for task in manifest.tasks if task.checkpoint}
    missing = [name for name in tasks or () if name not in saved]
    if missing or not saved:
        known = ", ".join(saved) or "none"
        raise UserError(
            f"--tasks: the run has no checkpoint of {', '.join(missing) or 'any task'} (but of: {known})"
        )
    return [(name, path) for name, path in saved.items() if tasks is None or name in tasks]


def read_speaker(name: str, directory: Path, info: BackboneInfo, warn: Callable[[str], None]) -> Speaker:
    """Read an adapter in PEFT's format.

    Args:
        name: In the conversation.
        directory: Of the adapter.
        info: The backbone.
        warn: Told if it was trained on another backbone.

    Raises:
        UserError: It cannot be read, or does not fit the backbone.
    """
    if not (directory / CONFIG).is_file():
        raise UserError(f"{directory} holds no {CONFIG}: give the directory of an adapter in PEFT's format")
    section: dict[str, Any] = {"adapter_name_or_path": str(directory.resolve())}
    task = {"name": name, "adapter": section, "data": {"path": "none"}, "training": {"max_steps": 1}}
    spec = read_task(task, Path.cwd())
    spec.adapter.modules(info.shape)  # refuses other backbones' in words
    check_backbone(directory, info, warn)
    return Speaker(name, spec, read_adapter(directory, spec.adapter, info.shape))
