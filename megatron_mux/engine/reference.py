"""What a preference task compares with: the backbone, or a frozen copy of the adapter that it starts from."""

from __future__ import annotations

import numpy as np

from megatron_mux import runtime
from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.engine.log_probs import LogProbs, Wanted
from megatron_mux.engine.task_state import Task, TaskState, reference_name
from megatron_mux.errors import SharedError, UserError
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec


def problem_of_preference(spec: TaskSpec, shape: BackboneShape) -> str:
    """Why a preference task cannot train what its adapter names; empty if it can.

    The gradient of an output layer is summed before the loss is known.
    """
    if spec.training.is_preference and any("head" in own.places for own in spec.adapter.own_rows(shape)):
        return (
            f"adapter: an output layer, or rows of it, cannot be trained with loss: {spec.training.loss}: leave it out "
            "of modules_to_save and trainable_token_indices"
        )
    return ""


def attach_reference(adapters: AdapterSet, task: Task, total_steps: int) -> TaskAdapter | None:
    """Attach a frozen copy of the adapter that a preference task starts from; None: its reference is the backbone.

    Raises:
        UserError: The task cannot learn a preference, or not on these ranks.
        torch.OutOfMemoryError: There is no memory for it.
    """
    spec = task.spec
    if spec.training.is_preference:
        adapters.host.parallel.experts.refuse("preferences", spec.name, spec.training.loss)
    problem = problem_of_preference(spec, adapters.host.shape)
    if problem:
        raise UserError(f"task {spec.name!r}: {problem}")
    if task.initial is None or not spec.training.needs_reference:
        return None
    copy = spec.model_copy(update={"name": reference_name(spec.name)})
    return adapters.add(copy, total_steps, task.initial)


def compute_references(log_probs: LogProbs, task: TaskState) -> str:
    """Compute what a task's reference makes of all its data, if it asks for that and it has not been done.

    Every rank calls it.

    Returns:
        Why it could not be done, the same on every rank; empty if it is done.
    """
    if not task.task.spec.training.precompute_ref_log_probs or task.reference_log_probs is not None:
        return ""
    if runtime.is_dry_run():  # no value counts, and these passes are smaller than those of a step
        task.reference_log_probs = np.zeros(len(task.task.data))
        return ""
    data = task.preferences
    try:
        [found] = log_probs.everywhere([Wanted(task, data.completion, range(len(data)), policy=False)])
    except SharedError as error:
        return str(error)
    task.reference_log_probs = found[1].numpy()
    return ""
