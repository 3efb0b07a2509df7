"""A task file as memory and time depend on it: its tasks' adapters, and the sequences of their steps.

Sequences are taken to be as long as their task allows, so what fits does so whatever the data. They are shared out
among pipelines and micro-batches as the engine does it.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from megatron_mux.backbone.registry import read_shape
from megatron_mux.choice.expert_files import read_expert_files
from megatron_mux.errors import UserError
from megatron_mux.fusion.plan import plan_for
from megatron_mux.fusion.step import Lengths, step_chunks
from megatron_mux.memory.forms.architecture import Architecture, architecture_of
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.task_adapters import TaskAdapters
from megatron_mux.memory.tensors import Skeleton
from megatron_mux.quantised.scheme import QuantMethod
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec, load_task_file

Content = Counter[str]
"""Number of sequences of each task in a micro-batch, by the task's name."""


@dataclass(frozen=True)
class Division:
    """A step that is divided among pipelines and micro-batches.

    Attributes:
        worst_cases: The micro-batches that no other one contains.
        micro_batches: Micro-batches of the pipeline that has most rows.
        rows: Rows of that pipeline, over all its micro-batches.
    """

    worst_cases: tuple[Content, ...]
    micro_batches: int
    rows: int


class FileStep:
    """One optimizer step of tasks that are trained together."""

    def __init__(self, tasks: Sequence[TaskAdapters]) -> None:
        self.tasks = tuple(tasks)
        self._lengths = {task.name: task.length for task in tasks}
        self._sequences = tuple((task.name, task.sequences, task.length, task.together) for task in tasks)
        self._together = {task.name: task.together for task in tasks}

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(task.sequences * task.length for task in self.tasks)

    def rows(self, content: Content) -> int:
        """Tokens of a micro-batch."""
        return sum(count * self._lengths[name] for name, count in content.items())

    def most(self, data: int) -> int:
        """The most micro-batches that `data` pipelines can have: one per record of the pipeline that has most."""
        return max(
            sum(count // self._together[name] for name, count in content.items())
            for pipeline in _pipelines(self._sequences, data, 1)
            for content in pipeline
        )

    def divided(self, data: int, micro_batches: int) -> Division:
        """The step on `data` pipelines, in `micro_batches` micro-batches or as many as there can be."""
        pipelines = _pipelines(self._sequences, data, min(micro_batches, self.most(data)))
        longest = max(pipelines, key=lambda p: sum(map(self.rows, p)))
        worst_cases: list[Content] = []
        for batch in sorted((part for p in pipelines for part in p), key=lambda part: -self.rows(part)):
            if not any(batch <= other for other in worst_cases):
                worst_cases.append(batch)
        return Division(tuple(worst_cases), len(longest), sum(map(self.rows, longest)))

    def mix(self, content: Content, recipe: Recipe) -> Recipe:
        """The recipe for such a micro-batch."""
        total = self.rows(content)
        return replace(recipe, mix=tuple(content[task.name] * task.length / total for task in self.tasks))


@lru_cache(maxsize=1024)
def _pipelines(
    tasks: Sequence[tuple[str, int, int, int]], data: int, micro_batches: int
) -> list[list[Content]]:
    """The micro-batches of each pipeline; of each task its name, its sequences, their tokens, and those of a record."""
    plan = plan_for("spatial", dict.fromkeys(sorted(name for name, *_ in tasks), 1), 1, micro_batches)
    # Micro-batches are not balanced by labels.
    lengths = {
        name: Lengths((length,) * count, (length,) * count, together=together)
        for name, count, length, together in tasks
    }
    steps = (step_chunks(replace(plan, data=data), lengths, rank) for rank in range(data))
    return [[Counter(piece.task for piece in chunk) for (chunk,) in step.chunks.values()] for step in steps]


@dataclass(frozen=True)
class TaskFile:
    """A task file for a backbone.

    Attributes:
        adapters: The adapters of its tasks, in the file's order.
        quantise: How its weights are quantised on load.
    """

    path: Path
    architecture: Architecture
    adapters: tuple[TaskAdapters, ...]
    specs: tuple[TaskSpec, ...]
    shape: BackboneShape
    quantise: QuantMethod | None = None

    @classmethod
    def read(
        cls,
        config: Path,
        tasks: Path,
        quantise: QuantMethod | None = None,
        placed: Path | None = None,
        profiled: Path | None = None,
    ) -> TaskFile:
        """A task file for the backbone of a config.json, whatever that file is called. No data is read.

        Args:
            config: The backbone's config.json, or its directory.
            quantise: How the backbone's weights are quantised on load.
            placed, profiled: See `read_expert_files`.

        Raises:
            UserError: The file or the backbone is invalid, or a task targets modules that the backbone does not have.
        """
        specs = load_task_file(tasks, data_later=True)
        shape = read_shape(config, quantise)
        adapters, problems = [], []
        for spec in specs:
            try:
                adapters.append(TaskAdapters.of(spec, shape))
            except UserError as error:
                problems += [f"{tasks}: task {spec.name!r}: {problem}" for problem in error.problems]
        if problems:
            raise UserError(*problems)
        architecture = architecture_of(shape, *read_expert_files(shape, placed, profiled))
        return cls(tasks, architecture, tuple(adapters), tuple(specs), shape, quantise)

    @classmethod
    def of(cls, arguments: Namespace, skeleton: Skeleton) -> TaskFile:
        """The task file of a tool's command line, checked.

        Args:
            arguments: `tasks`, `backbone_dtype`, `mux_expert_placement`, `expert_profile`, `sequence_length`.

        Raises:
            UserError: As `read`, or a sequence is too long.
        """
        found = cls.read(
            skeleton.path,
            arguments.tasks,
            arguments.backbone_dtype,
            arguments.mux_expert_placement,
            arguments.expert_profile,
        )
        found._check(skeleton.tensors.positions, arguments.sequence_length)
        return found

    def _check(self, positions: int | None, length: int | None) -> None:
        """Refuse sequences that are longer than the model or the user allows.

        Args:
            length: Tokens of the longest sequence, as the user gave it; None: not given.

        Raises:
            UserError: A sentence for each task.
        """
        problems = []
        for task in self.adapters:
            place = f"{self.path}: task {task.name!r}: data.max_length: {task.length}"
            if positions is not None and task.length + task.virtual_tokens > positions:
                more = f" plus {task.virtual_tokens} virtual tokens" if task.virtual_tokens else ""
                problems.append(f"{place}{more} is more than the {positions} positions of the model")
            if length is not None and task.length > length:
                problems.append(
                    f"{place} is more than --sequence-length {length}: a run cuts sequences at max_length alone: "
                    "lower it there, or leave the flag out"
                )
        if problems:
            raise UserError(*problems)
