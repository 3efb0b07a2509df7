"""A registered task that learns a preference: what it compares with, and what it reads beside its batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.data.preference_file import PreferenceDataset
from megatron_mux.data.tokenise import Example
from megatron_mux.engine.task_state import ForwardRows, TaskState
from megatron_mux.errors import UserError
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec


def problem_of_preference(spec: TaskSpec, shape: BackboneShape) -> str:
    """Why a preference task cannot train what its adapter names; empty if it can.

    The gradient of an output layer is summed before the loss is known.
    """
    if spec.training.is_preference and any("head" in rows.places for rows in spec.adapter.own_rows(shape)):
        return (
            f"adapter: an output layer, or rows of it, cannot be trained with loss: {spec.training.loss}: leave it out "
            "of modules_to_save and trainable_token_indices"
        )
    return ""


@dataclass
class PreferenceTask(TaskState):
    """A registered preference task on this rank.

    Attributes:
        reference: A frozen copy of the adapter that it started from; None: its reference is the backbone, or it has
            none.
        reference_log_probs: `[n]` of all sequences of its data under the reference, if it asks for them and they have
            been computed.
    """

    reference: TaskAdapter | None = None
    reference_log_probs: npt.NDArray[np.float64] | None = None

    def attach_more(self, adapters: AdapterSet) -> None:
        """Attach the reference.

        Raises:
            UserError: The task cannot learn a preference, or not on these ranks.
            torch.OutOfMemoryError: There is no memory for it.
        """
        spec = self.task.spec
        training = spec.training
        adapters.host.parallel.experts.refuse("preferences", spec.name, training.loss)
        if problem := problem_of_preference(spec, adapters.host.shape):
            raise UserError(f"task {spec.name!r}: {problem}")
        if self.task.initial is not None and training.needs_reference:
            copy = spec.model_copy(update={"name": self.reference_rows.name})
            self.reference = adapters.add(copy, self.total_steps, self.task.initial)
        if training.refers_in_steps:
            self.forward_rows = self.reference_rows
        if training.needs_kl:
            self.most_steps_at_once = (
                1  # its KL term is computed with the adapter as it is when a step begins
            )
        self.ready = not training.precompute_ref_log_probs

    @property
    def reference_rows(self) -> ForwardRows:
        """The rows that are computed with the reference."""
        name = f"{self.task.spec.name}@reference"  # of no task, since no task's name has an `@`
        if self.reference is None:
            return ForwardRows(name, None, 0)
        return ForwardRows(name, self.reference.slot, self.position_offset)

    @property
    def preferences(self) -> PreferenceDataset:
        """Its data."""
        return cast(PreferenceDataset, self.task.data)

    def label_weight(self, chosen: Sequence[int]) -> float:
        """One: the weights of rows follow from the step's log-probabilities (`engine.preference.losses`)."""
        return 1.0

    def extra_examples(self, step: int) -> list[Example]:
        """KTO's mismatched sequences: each prompt with the completion of the record before it."""
        if not self.task.spec.training.needs_kl:
            return []
        chosen = self.sampler.batch(step)
        return [self.preferences.mismatched(i, chosen[at - 1]) for at, i in enumerate(chosen)]
