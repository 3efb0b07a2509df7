"""The memory of a step, whatever is trained."""

from __future__ import annotations

from typing import Any

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.engine_step import EngineStepMemory
from megatron_mux.memory.forms.full_training import FullTrainingMemory
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.phases import StepMemory
from megatron_mux.memory.forms.recipe import Recipe


def step_memory(architecture: Architecture, recipe: Recipe, method: Method, **more: Any) -> StepMemory:
    """The memory of a method on its worst rank: of the engine where only adapters are trained.

    Args:
        architecture: The model.
        recipe: What is trained and how.
        method: How the step is divided.
        more: Further arguments of `StepMemory`.
    """
    kind = EngineStepMemory if recipe.frozen else FullTrainingMemory
    return kind(architecture, recipe, method, **more)
