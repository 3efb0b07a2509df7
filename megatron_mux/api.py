"""Training from Python: `megatron_mux.train` runs what `megatron-mux train` runs, and returns each task's result."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_mux.errors import UserError

if TYPE_CHECKING:
    from megatron_mux.tasks import TaskSpec
    from megatron_mux.training.callback import Callback
    from megatron_mux.training.commands import CommandSource


@dataclass(frozen=True)
class TaskResult:
    """What a run's directory says of a task.

    Attributes:
        name: The task.
        directory: Its directory, with `metrics.jsonl`.
        status: `finished`, `failed`, `removed`, `paused`, `pruned` (by a scheduler), or `running` if the run was
            stopped before its end.
        reason: Why it failed; else empty.
        step: Optimizer steps that the adapter has seen.
        adapter: The newest checkpoint (of a failed task the last good one), for `peft`; None if nothing was saved.
        best: The checkpoint of the best evaluation, if the task keeps it (`load_best_model_at_end`).
    """

    name: str
    directory: Path
    status: str
    reason: str
    step: int
    adapter: Path | None
    best: Path | None

    @property
    def history(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl`: one for each step, one for each evaluation."""
        try:
            lines = (self.directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    @property
    def loss(self) -> float | None:
        """Training loss of the last step; None before the first."""
        return next((line["loss"] for line in reversed(self.history) if "loss" in line), None)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last evaluation, such as `eval_loss`; empty without evaluation data."""
        evaluations = (line for line in reversed(self.history) if "loss" not in line)
        return {key: value for key, value in next(evaluations, {}).items() if key.startswith("eval_")}


def train(
    *,
    backbone: str | os.PathLike[str],
    tasks: str | os.PathLike[str] | Mapping[str, Any] | TaskSpec | Sequence[Mapping[str, Any] | TaskSpec],
    save: str | os.PathLike[str],
    gpus: int | None = None,
    processes: int | None = None,
    commands: CommandSource | None = None,
    callbacks: Sequence[Callback] = (),
    **flags: Any,
) -> dict[str, TaskResult]:
    """Train tasks and return their results by name.

    Args:
        backbone: A Hugging Face directory, or `org/name` in the Hugging Face cache.
        tasks: Path of a task file; or one task or a list, each a `TaskSpec` or a mapping as in a task file, whose
            relative paths start at the working directory.
        save: Directory for adapters, metrics, plan and schedule.
        gpus, processes: As the flags of `megatron-mux train`; by default as many processes as parallel sizes need. One
            trains in this process, several are started.
        commands: Tells the run which tasks join, pause, go on and leave while it trains, such as a
            `training.commands.CommandQueue`; the run then goes on until a `Drain`. Where torchrun has started several
            processes, each gives a source, and that of the first is asked.
        callbacks: Told what becomes of tasks (`state_changed`), and when steps, saves and evaluations are due.
        flags: Other flags of `megatron-mux train`, with underscores: `load="runs/first"`, `bf16=True`.

    Raises:
        UserError: The input is wrong; or processes would have to be started, which get neither `commands` nor
            `callbacks`.
        RuntimeError: One of several processes failed; it has printed why.
    """
    from megatron_mux.cli.train import build_parser
    from megatron_mux.tasks import TaskSpec

    with tempfile.TemporaryDirectory(prefix="megatron-mux-") as folder:
        if isinstance(tasks, (Mapping, TaskSpec)):
            tasks = [tasks]
        file = Path(tasks) if isinstance(tasks, (str, os.PathLike)) else _task_file(tasks, Path(folder))
        given = {
            "backbone": backbone,
            "mux_tasks": file,
            "save": save,
            "gpus": gpus,
            "processes": processes,
            **flags,
        }
        known = build_parser()._option_string_actions
        words = [word for name, value in given.items() for word in _words(name, value, known)]
        _run(words, commands, callbacks)
    return read_run(save)


def _run(words: Sequence[str], commands: CommandSource | None, callbacks: Sequence[Callback]) -> None:
    """Train in this process, or in those that it starts; see `train`."""
    from megatron_mux.cli.launch import is_launched, run_processes
    from megatron_mux.cli.train import PROGRAM, plan_run
    from megatron_mux.gpus import set_allocator_options

    arguments, count = plan_run(words, PROGRAM)
    if count > 1 and not is_launched():
        if commands is not None or callbacks:
            raise UserError(
                f"commands, callbacks: are not passed to the {count} processes that this one would start: start "
                "this script with torchrun, or train on one process"
            )
        status = run_processes(["train", *words], count, PROGRAM)
        if status:
            raise RuntimeError(f"training ended with status {status}: its processes have printed why")
    else:
        set_allocator_options()
        from megatron_mux.runtime import shutdown  # imports torch: seconds
        from megatron_mux.training.run import run

        try:
            run(arguments, PROGRAM, commands, callbacks)
        finally:
            shutdown()


def read_run(directory: str | os.PathLike[str]) -> dict[str, TaskResult]:
    """Results of a run's tasks by name, as the newest save in its `save` directory has them.

    Raises:
        UserError: Nothing was saved there.
    """
    from megatron_mux.saved_files import manifests

    directory = Path(directory)
    saves = sorted(manifests(directory))
    if not saves:
        raise UserError(f"{directory}: no run was saved there")
    entries = json.loads(saves[-1][1].read_text(encoding="utf-8"))["tasks"]
    return {
        entry["name"]: TaskResult(
            name=entry["name"],
            directory=directory / entry["name"],
            status=entry["status"],
            reason=entry["reason"],
            step=entry["step"],
            adapter=_checkpoint(directory, entry["checkpoint"]),
            best=_checkpoint(directory, entry.get("best", {}).get("checkpoint", "")),
        )
        for entry in entries
    }


def _checkpoint(directory: Path, relative: str) -> Path | None:
    return directory / relative if relative else None


def _task_file(tasks: Sequence[Mapping[str, Any] | TaskSpec], folder: Path) -> Path:
    """Check tasks and write them to a task file."""
    from megatron_mux.tasks import TaskSpec, read_task

    specs, problems = [], []
    for number, task in enumerate(tasks, 1):
        if not isinstance(task, (Mapping, TaskSpec)):
            problems.append(f"task {number}: must be a mapping or a TaskSpec, got {task!r}")
            continue
        try:
            specs.append(read_task(task.plain() if isinstance(task, TaskSpec) else task, Path.cwd()))
        except UserError as error:
            name = task.name if isinstance(task, TaskSpec) else task.get("name", number)
            problems += [f"task {name!r}: {text.removeprefix('task: ')}" for text in error.problems]
    repeated = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
    problems += [f"task {name!r}: several tasks have this name" for name in repeated]
    if problems:
        raise UserError(*problems)
    path = folder / "tasks.yaml"
    path.write_text(json.dumps({"tasks": [spec.plain() for spec in specs]}), encoding="utf-8")  # JSON is YAML
    return path


def _words(name: str, value: Any, known: Collection[str]) -> list[str]:
    """The words of a command line that set a flag, of those that the parser knows."""
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if value is False:
        opposite = flag.replace("--", "--no-", 1)
        return [opposite] if opposite in known else []
    if value is True:
        return [flag]
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return [flag, os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
