"""What may differ in a task that continues from a save; checked once its data are open."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_mux.checkpoint import SavedTask
from megatron_mux.engine import Task
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec, TrainingSpec

EDITS = (
    f"a task that continues may change training.{', '.join(TrainingSpec.length_fields)} (as far as its schedule "
    f"allows), {', '.join(TrainingSpec.undecided)}, its eval section, and paths"
)
"""Which fields of a saved task may change."""


def changed(entry: SavedTask, spec: TaskSpec) -> str:
    """Why `spec` cannot continue `entry`, apart from its length and data; empty if it can."""
    differences = spec.differences(TaskSpec.model_validate(entry.spec))
    if not differences:
        return ""
    what = "; ".join(differences)
    return (
        f"task {spec.name!r} is not as it was saved ({what}): set that back, or give the task a new name "
        "(adapter_name_or_path starts it from a checkpoint)"
    )


def saved_length(task: Task, entry: SavedTask) -> int:
    """Optimizer steps that a task was to run for when it was saved."""
    return TaskSpec.model_validate(entry.spec).total_steps(len(task.data))


def is_over(task: Task, entry: SavedTask | None) -> bool:
    """Whether a saved task is not to train on: it has failed, or has finished and is not to run longer."""
    if entry is None or entry.status not in ("finished", "failed"):
        return False
    return entry.status == "failed" or task.spec.total_steps(len(task.data)) <= saved_length(task, entry)


def continue_task(task: Task, entry: SavedTask) -> Iterator[str]:
    """Compare a task with its save, and take over the lengths that it has had; yields what a user should know.

    Raises:
        UserError: The task cannot go on from there.
    """
    if is_over(task, entry):
        if (steps := task.spec.total_steps(len(task.data))) < entry.step:
            yield f"{task.spec.name}: {entry.step} steps are done, more than the {steps} it is to have now"
        return
    if entry.data not in ("", task.data.fingerprint):
        raise UserError(
            f"{task.data.path} is not what it was when the run was saved: restore it, or give the task a new name"
        )
    if entry.reference not in ("", task.reference_fingerprint()):
        raise UserError(
            f"adapter.adapter_name_or_path ({task.spec.adapter.adapter_name_or_path}) holds other weights than when "
            "the run was saved, and training.loss compares with them: restore them, or give the task a new name"
        )
    task.lengths = entry.lengths
    before, now = saved_length(task, entry), task.spec.total_steps(len(task.data))
    if before == now:
        return
    yield f"{task.spec.name}: its length is {now} steps now, and was {before} when the run was saved"
    if entry.step:
        yield from _change_length(task, entry.step, before, now)


def _change_length(task: Task, done: int, before: int, now: int) -> Iterator[str]:
    """Let a task of which steps are `done` run for `now` steps instead of `before`."""
    training, adapter = task.spec.training, task.spec.adapter
    field = "max_steps" if training.max_steps is not None else "num_train_epochs"
    what = f"training.{field}: {now} steps instead of {before}"
    new_name = "give the task a new name (adapter_name_or_path starts it from a checkpoint)"
    if now <= done:
        raise UserError(f"{what}, and {done} are done: give more than that, or set it back")
    frozen, then = (adapter.freezes_after(steps) for steps in (before, now))
    if frozen is not None and then is not None and frozen != then and done >= min(frozen, then):
        raise UserError(
            f"{what}: a {adapter.peft_type} is frozen after {then} steps then instead of {frozen}, and {done} are "
            f"done: set it back, or {new_name}"
        )
    past, curve = (training.rate_curve(steps, task.lengths) for steps in (before, now))
    if all(past(step) == curve(step) for step in range(done)):
        return
    if training.lr_scheduler_on_resume is None:
        raise UserError(
            f"{what}: with them the {done} steps done would have had other learning rates: add "
            "training.lr_scheduler_on_resume: continue, which leads the rate from where it is to the curve of "
            f"{now} steps; set it back; or {new_name}"
        )
    task.lengths = (*task.lengths, (done, before))
    rate = training.learning_rate * past(done - 1)
    yield f"{task.spec.name}: its learning rate goes on from {rate:.3g} to the curve of {now} steps"
