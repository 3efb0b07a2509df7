"""What tasks may ask of training steps beside a loss over labels; a new kind of it is added here."""

from __future__ import annotations

from megatron_mux.engine.acting_adapters import ActingAdapters
from megatron_mux.engine.balancing_loss import BalancingLosses
from megatron_mux.engine.expert_managers import ManagerSums
from megatron_mux.engine.preference.losses import PreferenceLosses
from megatron_mux.engine.preference.task import PreferenceTask
from megatron_mux.engine.step_extension import StepExtension
from megatron_mux.engine.task_state import TaskState
from megatron_mux.engine.tied_rows import TiedRows
from megatron_mux.runtime import Parallel
from megatron_mux.tasks import TaskSpec

EXTENSIONS: tuple[type[StepExtension], ...] = (
    BalancingLosses, PreferenceLosses, TiedRows, ManagerSums, ActingAdapters,
)  # fmt: skip
"""In the order in which a step calls those of a task; tasks in the order of the plan."""


def state_of(spec: TaskSpec) -> type[TaskState]:
    """The class of a registered task's state."""
    return PreferenceTask if spec.training.is_preference else TaskState


def extensions_of(task: TaskState, parallel: Parallel) -> tuple[type[StepExtension], ...]:
    """The kinds that a task asks for."""
    return tuple(kind for kind in EXTENSIONS if kind.wanted_by(task, parallel))
