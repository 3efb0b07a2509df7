"""The memory of a step: of full fine-tuning, or of the engine with all adapters in one hybrid task."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.engine_memory import EngineMemory, Rows
from megatron_mux.memory.forms.full_training import FullTrainingMemory
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.phases import AT, PARTS, Array, Phases, StepMemory, in_flight
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage
from megatron_mux.memory.step_profile import Profiles


def step_memory(
    architecture: Architecture, recipe: Recipe, method: Method, profiles: Profiles | None = None, **more: Any
) -> StepMemory:
    """The memory of a method; of the engine if only adapters are trained.

    Args:
        architecture: The model.
        recipe: What is trained and how.
        method: How the step is divided.
        profiles: Profiles of full fine-tuning; None where only adapters are trained.
        more: Further arguments of `StepMemory`.
    """
    if recipe.frozen:
        return EngineStepMemory(architecture, recipe, method, **more)
    if profiles is None:
        raise ValueError("full fine-tuning is estimated from profiles of its step")
    return FullTrainingMemory(architecture, recipe, method, profiles, **more)


class EngineStepMemory(StepMemory):
    """See `StepMemory`; the recipe has adapters. All micro-batches are equal."""

    @cached_property
    def memories(self) -> list[EngineMemory]:
        """Lasting memory and memory of micro-batches, without fragmentation, which is a part of its own here.

        One for each expert rank, if these may differ.
        """
        differ = self.architecture.placement is not None or self.architecture.access is not None
        return [
            EngineMemory(
                self.architecture,
                self.recipe.adapters,
                [stage.layers for stage in self.stages],
                self.method,
                self.recipe.size,
                [(task.length,) for task in self.recipe.adapters],
                self.device,
                self.gpu,
                fragmentation=False,
                expert_rank=rank,
            )
            for rank in (range(self.method.expert) if differ else (None,))
        ]

    def hosted(self, stage: Stage) -> float:
        """See `StepMemory.hosted`: the backbone's weights."""
        values = stage.divided(self.method) if self.method.zero == 3 else stage.values
        return values * self.recipe.size

    @property
    def buffers(self) -> Array:
        """See `StepMemory.buffers`."""
        return self.memories[0].lasting.buffer

    def tensors(self, rows: int) -> Phases:
        """See `StepMemory.tensors`; gradients exist from the second micro-batch on, and in trials."""
        names, stages, sizes = zip(*(self._tensors(memory, rows) for memory in self.memories), strict=True)
        return Phases([name for own in names for name in own], np.concatenate(stages), np.concatenate(sizes))

    def _tensors(self, memory: EngineMemory, rows: int) -> Phases:
        """The same of one expert rank in each stage."""
        stages, lasting = self.method.pipeline, memory.lasting
        found = memory.passes(self._rows(rows), self.method.micro_batches)
        kept = np.array(in_flight(stages, self.method.micro_batches)) * found.kept[0]
        phases: dict[str, dict[str, Array]] = {
            "the loss": {
                "activations": kept + found.loss[0],
                "logits": found.logits[0],
                "communication": found.messages[0] + lasting.head_in_use,
            },
            "the last layer's backward pass": {
                "activations": kept + found.recomputed[0],
                "workspace": found.workspace[0],
                "communication": found.messages[0] + lasting.in_use,
            },
            "the optimizer's step": {"workspace": memory.step_scratch},
        }
        lasts = {
            "parameters": lasting.parameters,
            "adapters": lasting.adapters,
            "gradients": lasting.gradients,
            "optimizer": lasting.moments,
        }
        table = np.zeros((len(phases), stages, len(PARTS)))
        for place, parts in enumerate(phases.values()):
            for part, sizes in (lasts | parts).items():
                table[place, :, AT[part]] = sizes
        # Only the last stage has a loss.
        names = [name for name in phases for _ in range(stages)]
        chosen = slice(stages - 1, None)
        return Phases(
            names[chosen],
            np.tile(np.arange(stages), len(phases))[chosen],
            table.reshape(-1, len(PARTS))[chosen],
        )

    def _rows(self, rows: int) -> Rows:
        """A micro-batch in which each task has its share, every row labelled."""
        shares, tasks = np.array(self.recipe.shares), self.recipe.adapters
        copied = sum(
            share / task.length * task.virtual_tokens
            for share, task in zip(self.recipe.shares, tasks, strict=True)
        )
        total = np.array([float(rows)])
        return Rows(shares[None, :] * rows, total, total, copied * total)
