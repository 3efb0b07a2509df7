"""The step of a task file: every task's own sequences, and what a micro-batch holds of them at most.

Sequences are taken to be as long as their task allows, so what fits does so whatever the data. They are shared out
among pipelines and micro-batches as the engine does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_mux.fusion.alignment import Chunk
from megatron_mux.fusion.plan import plan_for
from megatron_mux.fusion.step import Lengths, step_grid
from megatron_mux.memory.forms.recipe import Portion, Recipe
from megatron_mux.tasks import TaskSpec


@dataclass(frozen=True)
class TaskBatch:
    """A task's sequences of one optimizer step, over all ranks.

    Attributes:
        name: The task.
        sequences: How many.
        length: Tokens of each, at most.
    """

    name: str
    sequences: int
    length: int

    @classmethod
    def of(cls, spec: TaskSpec) -> TaskBatch:
        """Of a validated task."""
        return cls(spec.name, spec.sequences_per_step, spec.data.max_length)


@dataclass(frozen=True)
class Content:
    """What a micro-batch holds.

    Attributes:
        sequences: Of each task, by name; tasks without any are left out.
        rows: Tokens of each.
    """

    sequences: Mapping[str, int]
    rows: Mapping[str, int]

    @cached_property
    def total(self) -> int:
        """All rows."""
        return sum(self.rows.values())

    @cached_property
    def count(self) -> int:
        """All sequences."""
        return sum(self.sequences.values())

    def within(self, other: Content) -> bool:
        """Whether another one has as much of every task."""
        return all(rows <= other.rows.get(name, 0) for name, rows in self.rows.items())


@dataclass(frozen=True)
class Division:
    """A step that is divided among pipelines and micro-batches.

    Attributes:
        heaviest: Micro-batches, none of which holds all that another does.
        micro_batches: Of the pipeline that has most rows.
        rows: Of that pipeline, in all its micro-batches.
    """

    heaviest: tuple[Content, ...]
    micro_batches: int
    rows: int


@dataclass(frozen=True)
class FileStep:
    """One optimizer step of all tasks of a file, trained together."""

    tasks: tuple[TaskBatch, ...]

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(task.sequences * task.length for task in self.tasks)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(task.length for task in self.tasks)

    def most(self, data: int) -> int:
        """How many micro-batches so many pipelines can have: one for each sequence of the one that has most."""
        return max(content.count for content in _whole(self.tasks, data))

    def divided(self, data: int, micro_batches: int) -> Division:
        """The step on so many pipelines, in so many micro-batches."""
        return _divided(self.tasks, data, min(micro_batches, self.most(data)))

    def mix(self, content: Content, recipe: Recipe) -> Recipe:
        """The recipe for such a micro-batch."""
        lengths = {task.name: task.length for task in self.tasks}
        portions = (
            Portion(content.rows.get(task.name, 0) / content.total, lengths[task.name])
            for task in recipe.adapters
        )
        return replace(recipe, mix=tuple(portions))


@lru_cache(maxsize=4096)
def _divided(tasks: tuple[TaskBatch, ...], data: int, micro_batches: int) -> Division:
    pipelines = _pipelines(tasks, data, micro_batches)
    longest = max(pipelines, key=lambda own: sum(part.total for part in own))
    contents = [part for own in pipelines for part in own]
    return Division(_maximal(contents), len(longest), sum(part.total for part in longest))


@lru_cache(maxsize=256)
def _whole(tasks: tuple[TaskBatch, ...], data: int) -> tuple[Content, ...]:
    """All that each pipeline has."""
    return tuple(content for own in _pipelines(tasks, data, 1) for content in own)


def _pipelines(tasks: Sequence[TaskBatch], data: int, micro_batches: int) -> list[list[Content]]:
    """The micro-batches of each pipeline."""
    names = sorted(task.name for task in tasks)
    plan = replace(plan_for("spatial", dict.fromkeys(names, 1), 1, micro_batches), data=data)
    # Labels are nothing that micro-batches are balanced by.
    lengths = {t.name: Lengths((t.length,) * t.sequences, (t.length,) * t.sequences) for t in tasks}
    grids = (step_grid(plan, lengths, rank) for rank in range(data))
    return [[_content(chunk) for (chunk,) in grid.chunks.values()] for grid in grids]


def _content(chunk: Chunk) -> Content:
    sequences: dict[str, int] = {}
    rows: dict[str, int] = {}
    for piece in chunk:
        sequences[piece.task] = sequences.get(piece.task, 0) + 1
        rows[piece.task] = rows.get(piece.task, 0) + piece.tokens
    return Content(sequences, rows)


def _maximal(contents: Sequence[Content]) -> tuple[Content, ...]:
    """Those that are not within another one, the one with most rows first."""
    found: list[Content] = []
    for one in sorted(contents, key=lambda content: -content.total):
        if not any(one.within(other) for other in found):
            found.append(one)
    return tuple(found)
