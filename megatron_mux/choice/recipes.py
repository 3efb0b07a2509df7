"""From what a user says to what is predicted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_mux.backbone.registry import read_shape
from megatron_mux.choice.step import FileStep, TaskBatch
from megatron_mux.errors import UserError
from megatron_mux.fusion.device import Device, device_of
from megatron_mux.gpus import known
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.backbones import architecture_of
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.tasks import load_task_file

DEFAULT_DEVICE = "A100"


@dataclass(frozen=True)
class TaskFile:
    """A task file, as far as it decides about memory and time.

    Attributes:
        path: Where it is.
        architecture: The backbone's.
        adapters: Of its tasks, in the file's order.
        step: The sequences of one optimizer step of each.
    """

    path: Path
    architecture: Architecture
    adapters: tuple[TaskAdapters, ...]
    step: FileStep

    @classmethod
    def read(cls, config: Path, tasks: Path) -> TaskFile:
        """A task file for the backbone of a config.json, whatever that file is called. No data is read.

        Raises:
            UserError: The file or the backbone is not as it must be, or a task's targets are not there.
        """
        specs = load_task_file(tasks, data_later=True)
        shape = read_shape(config)
        found, problems = [], []
        for spec in specs:
            try:
                found.append(TaskAdapters.of(spec, shape))
            except UserError as error:
                problems += [f"{tasks}: task {spec.name!r}: {problem}" for problem in error.problems]
        if problems:
            raise UserError(*problems)
        return cls(
            tasks,
            architecture_of(shape),
            tuple(found),
            FileStep(tuple(TaskBatch.of(spec) for spec in specs)),
        )

    def check(self, positions: int | None, length: int | None) -> None:
        """Refuse sequences that are longer than the model or the user has it.

        Args:
            positions: Of the model; None: not limited.
            length: Tokens of the longest sequence as the user says; None: nothing is said.

        Raises:
            UserError: A sentence for each task.
        """
        problems = []
        for task, adapter in zip(self.step.tasks, self.adapters, strict=True):
            place = f"{self.path}: task {task.name!r}: data.max_length: {task.length}"
            needed = task.length + adapter.virtual_tokens
            if positions is not None and needed > positions:
                more = f" plus {adapter.virtual_tokens} virtual tokens" if adapter.virtual_tokens else ""
                problems.append(f"{place}{more} is more than the {positions} positions of the model")
            if length is not None and task.length > length:
                problems.append(
                    f"{place} is more than --sequence-length {length}: a run cuts sequences at max_length alone: "
                    "lower it there, or leave the flag out"
                )
        if problems:
            raise UserError(*problems)


def gpu(name: str) -> Device:
    """A GPU's limits by its name.

    Raises:
        UserError: It is not known.
    """
    known(name)
    return device_of("cuda", name, 0)
