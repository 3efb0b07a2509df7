"""The memory of a step, whatever is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.engine_step import EngineStepMemory
from megatron_mux.memory.forms.full_training import FullTrainingMemory
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.phases import StepMemory
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.step_profile import StepProfile

Profiles = Callable[[bool], StepProfile]
"""The profile of a full fine-tuning step, with all layers recomputed or without."""


def step_memory(
    architecture: Architecture, recipe: Recipe, method: Method, profiles: Profiles | None = None, **more: Any
) -> StepMemory:
    """The memory of a method on its worst rank: of the engine where only adapters are trained.

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
    return FullTrainingMemory(architecture, recipe, method, profiles(method.recompute == "full"), **more)
