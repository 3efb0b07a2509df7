"""What a preference task compares with: the backbone, or a frozen copy of the adapter that it starts from."""

from __future__ import annotations

import numpy as np

from megatron_mux import runtime
from megatron_mux.adapters.adapter import TaskAdapter
from megatron_mux.adapters.attach import AdapterSet
from megatron_mux.engine.log_probs import LogProbs
from megatron_mux.engine.task_state import Task, reference_name
from megatron_mux.errors import UserError


def attach_reference(adapters: AdapterSet, task: Task, total_steps: int) -> TaskAdapter | None:
    """Attach a frozen copy of the adapter that a preference task starts from; None: its reference is the backbone.

    Raises:
        UserError: Preference tasks do not run on these ranks.
        torch.OutOfMemoryError: There is no memory for it.
    """
    spec = task.spec
    if spec.training.is_preference and adapters.host.parallel.experts.broker is not None:
        raise UserError(
            f"task {spec.name!r}: training.loss: {spec.training.loss} does not run with expert managers: use "
            "expert-parallel ranks"
        )
    if task.initial is None or not spec.training.needs_reference:
        return None
    copy = spec.model_copy(update={"name": reference_name(spec.name)})
    return adapters.add(copy, total_steps, task.initial)


def detach(adapters: AdapterSet, name: str) -> None:
    """Detach a task's adapter, and the copy that is its reference."""
    adapters.remove(name)
    if reference_name(name) in adapters.tasks:
        adapters.remove(reference_name(name))


def compute_references(log_probs: LogProbs) -> None:
    """Compute what a task's reference makes of all its data, if it asks for that and it has not been done.

    Every rank calls it.

    Raises:
        UserError: Some rank has no memory for a pass; on every rank.
    """
    task = log_probs.task
    if not task.task.spec.training.precompute_ref_log_probs or task.reference_log_probs is not None:
        return
    if runtime.is_dry_run():  # no value counts, and these passes are smaller than those of a step
        task.reference_log_probs = np.zeros(len(task.task.data))
    else:
        task.reference_log_probs = log_probs.of_data(task.preferences).numpy()
