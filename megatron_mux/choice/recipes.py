"""From what a user says to what is predicted."""

from __future__ import annotations

from pathlib import Path

from megatron_mux.errors import UserError
from megatron_mux.fusion.roofline import GPUS, Device, device_of
from megatron_mux.memory.forms.sites import Configured, TaskAdapters
from megatron_mux.tasks import load_task_file

DEFAULT_DEVICE = "A100"


def task_adapters(config: Path, tasks: Path) -> tuple[TaskAdapters, ...]:
    """The adapters of a task file on the backbone of a config.json. No data is read.

    Raises:
        UserError: The file or the backbone is not as it must be, or a task's targets are not there.
    """
    if config.name != "config.json":
        raise UserError(
            f"--model {config}: with --tasks the file must be the config.json of a backbone's directory"
        )
    specs = load_task_file(tasks, data_later=True)
    info = Configured.read(config.parent)
    found, problems = [], []
    for spec in specs:
        try:
            found.append(TaskAdapters.of(spec, info))
        except UserError as error:
            problems += [f"{tasks}: task {spec.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return tuple(found)


def gpu(name: str) -> Device:
    """A GPU's limits by its name.

    Raises:
        UserError: It is not known.
    """
    if not any(known in name.upper() for known in GPUS):
        raise UserError(f"--device {name}: is not known: choose from {', '.join(GPUS)}")
    return device_of("cuda", name, 0)
