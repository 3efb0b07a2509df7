"""The memory of a step of the engine, with all tasks in one hybrid task, from tables of bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megatron_mux.footprint.content import ATTENTION, Contents
from megatron_mux.footprint.memory import Memory
from megatron_mux.fusion.alignment import Slice
from megatron_mux.fusion.contents import contents_of
from megatron_mux.fusion.step import Lengths
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.full_training import FullTrainingMemory
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.phases import AT, PARTS, Array, Phases, StepMemory, in_flight
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage
from megatron_mux.memory.step_profile import Profiles


@dataclass(frozen=True)
class TaskMemory:
    """What tables say of a method.

    Attributes:
        memories: Of the tasks' signatures, on each expert rank where these differ, else on any.
        columns: The signature of each task, in the tasks' order.
        counts: `[signatures]` tasks of each; one of a lower rank is less than one.
    """

    memories: Sequence[Memory]
    columns: Sequence[int]
    counts: Array


class Tables(Protocol):
    """Makes or reads the tables of methods: `estimate.method_tables`."""

    def prepare(self, methods: Sequence[ParallelConfig], known: Callable[[ParallelConfig], None]) -> None:
        """Make what is missing for these. Calls raise what could not be made.

        Args:
            known: Told of each that can be asked for.
        """

    def __call__(self, method: ParallelConfig) -> TaskMemory:
        """What tables say of a method.

        Raises:
            UserError: They cannot be made.
        """


def step_memory(
    architecture: Architecture,
    recipe: Recipe,
    method: ParallelConfig,
    profiles: Profiles | None = None,
    tables: Tables | None = None,
    **more: Any,
) -> StepMemory:
    """The memory of a method; of the engine if only adapters are trained.

    Args:
        profiles: Profiles of full fine-tuning; None where only adapters are trained.
        tables: Of tasks; None in full fine-tuning.
        more: Further arguments of `StepMemory`.
    """
    if recipe.frozen:
        if tables is None:
            raise ValueError("tasks are estimated from tables of the engine")
        of_method = tables(replace(method, parts=None))  # micro-batches do not matter to tables
        return EngineStep(of_method, architecture, recipe, method, **more)
    if profiles is None:
        raise ValueError("full fine-tuning is estimated from profiles of its step")
    return FullTrainingMemory(architecture, recipe, method, profiles, **more)


class EngineStep(StepMemory):
    """See `StepMemory`; the recipe has adapters. All micro-batches are equal."""

    def __init__(
        self,
        tasks: TaskMemory,
        architecture: Architecture,
        recipe: Recipe,
        method: ParallelConfig,
        **more: Any,
    ) -> None:
        super().__init__(architecture, recipe, method, **more)
        self._tasks = tasks
        self._persistent = [memory.persistent_parts(tasks.counts) for memory in tasks.memories]

    def hosted(self, stage: Stage) -> float:
        """See `StepMemory.hosted`: the backbone's weights."""
        held = replace(stage, counts=tuple(part.bytes(self.recipe.size) for part in stage.counts))
        return float(held.divided(self.method) if self.method.zero == 3 else held.values)

    @property
    def buffers(self) -> Array:
        """See `StepMemory.buffers`."""
        return self._persistent[0]["sums"]

    def tensors(self, rows: int) -> Phases:
        """See `StepMemory.tensors`; gradients exist from the second micro-batch on, and in trials."""
        contents, tensors = self._contents(rows), list[tuple[str, int, Array]]()
        for memory, persistent in zip(self._tasks.memories, self._persistent, strict=True):
            lasts = {
                "parameters": persistent["backbone"],
                **{part: persistent[part] for part in ("adapters", "gradients", "optimizer")},
            }
            taken = memory.passes(contents, self.method.micro_batches)
            kept = np.array(in_flight(self.method.pipeline, self.method.micro_batches)) * taken.kept[0]
            updating = memory.updating(self._tasks.counts)
            for stage, moments in enumerate(memory.moments(contents)):
                messages = taken.working[0, stage] - max(size for size, _ in moments.values())
                phases: dict[str, Mapping[str, float]] = {
                    name: {
                        "activations": kept[stage],
                        "logits": logits,
                        "workspace": size - logits,
                        "communication": messages,
                    }
                    for name, (size, logits) in moments.items()
                }
                phases["the optimizer's step"] = {"workspace": updating[stage]}
                for name, parts in phases.items():
                    row = np.zeros(len(PARTS))
                    for part, size in parts.items():
                        row[AT[part]] = size
                    for part, each in lasts.items():
                        row[AT[part]] = each[stage]
                    tensors.append((name, stage, row))
        names, stages, sizes = zip(*tensors, strict=True)
        return Phases(names, np.array(stages), np.stack(sizes))

    def _contents(self, rows: int) -> Contents:
        """A micro-batch in which each task has its share of the rows, in whole sequences or not, all labelled."""
        each = np.zeros((1, len(self._tasks.counts)))
        sequences = 0.0
        for task, share, column in zip(
            self.recipe.adapters, self.recipe.shares, self._tasks.columns, strict=True
        ):
            each[0, column] += share * rows
            sequences += share * rows / task.length
        attention = self._attention(rows) if self.device == "cpu" else np.zeros(len(ATTENTION))
        return Contents(each, each.copy(), np.array([sequences]), np.zeros(1), attention[None])

    def _attention(self, rows: int) -> Array:
        """What a CPU's attention does on such a micro-batch, of whole sequences."""
        pieces, lengths = list[Slice](), dict[str, Lengths]()
        for task, share in zip(self.recipe.adapters, self.recipe.shares, strict=True):
            count = max(1, round(share * rows / task.length)) if share else 0
            pieces += [Slice(task.name, number, 0, task.length) for number in range(count)]
            lengths[task.name] = Lengths(*((task.length,) * count,) * 2)
        prefixed = {task.name for task in self.recipe.adapters if task.virtual_tokens}
        contents: Array = contents_of(
            [pieces], lengths, dict.fromkeys(lengths, 0), 1, "cpu", prefixed
        ).attention[0]
        return contents
