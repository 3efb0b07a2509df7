"""From task specs to tasks ready to register: compared with a save, data opened, checked against the backbone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron_mux.adapters.peft_format import read_adapter
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.checkpoint import Manifest, SavedTask
from megatron_mux.data.dataset import DataFiles
from megatron_mux.engine import Task
from megatron_mux.engine.preference.task import problem_of_preference
from megatron_mux.errors import UserError
from megatron_mux.optimizers.loraplus import group_of
from megatron_mux.shape import BackboneShape
from megatron_mux.tasks import TaskSpec
from megatron_mux.training.eval_setup import problems_of_evaluation
from megatron_mux.training.resumed import EDITS, changed, continue_task

Progress = Callable[[str], None]
"""Told what is going on, a line at a time."""

NO_ENTRIES: Mapping[str, SavedTask] = {}


def merge_saved(specs: Sequence[TaskSpec], manifest: Manifest | None) -> list[TaskSpec]:
    """The tasks to run: saved ones in their order, then new ones.

    Args:
        specs: The tasks of the task file.
        manifest: The save to continue from, if any.

    Raises:
        UserError: The spec of a saved task has changed in what decides its updates.
    """
    if manifest is None:
        return list(specs)
    given = {spec.name: spec for spec in specs}
    saved = {entry.name: entry for entry in manifest.tasks}
    problems = [changed(saved[name], spec) for name, spec in given.items() if name in saved]
    if any(problems):
        raise UserError(*(problem for problem in problems if problem), EDITS)
    order = [name for name in saved if name in given] + [name for name in given if name not in saved]
    return [given[name] for name in order]


def check_joining(
    specs: Sequence[TaskSpec],
    entries: Mapping[str, SavedTask],
    registered: Collection[str],
    waiting: Collection[str],
    continued: bool,
) -> None:
    """Refuse tasks that would join a run under a name that it has already used.

    Args:
        specs: The tasks that would join.
        entries: Every task the run has had, by name.
        registered: Names of tasks that train now.
        waiting: Names of tasks that wait for memory.
        continued: Whether the run continues a save: a task of that save may still join, if it is unchanged.

    Raises:
        UserError: A name is taken.
    """
    problems: list[str] = []
    for spec in specs:
        entry = entries.get(spec.name)
        if entry is None and spec.name not in waiting:
            continue
        if entry is None or spec.name in registered or entry.status == "removed" or not continued:
            problems.append(f"task {spec.name!r}: this run has or had a task of that name: choose another")
        elif difference := changed(entry, spec):
            problems += [difference, EDITS]
    if problems:
        raise UserError(*problems)


def open_tasks(
    specs: Sequence[TaskSpec],
    info: BackboneInfo,
    files: DataFiles,
    say: Progress,
    entries: Mapping[str, SavedTask] = NO_ENTRIES,
) -> list[Task]:
    """Open every task's data and check it against the backbone and its save.

    Args:
        specs: Validated tasks.
        info: The backbone's shape and module names.
        files: Opens their data.
        say: Told how many records were cut or dropped, what they lost, and what changes in tasks that continue.
        entries: Tasks of the run that is continued, by name.

    Returns:
        The tasks, in the same order.

    Raises:
        UserError: With the problems of all tasks.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    for spec in specs:
        try:
            tasks.append(_open(spec, info, files, say, entries.get(spec.name)))
        except UserError as error:
            problems += [f"task {spec.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return tasks


def _check_tensors(spec: TaskSpec, shape: BackboneShape) -> None:
    """Refuse an adapter that the backbone cannot have, and LoRA+ for one that has no tensor of its rate."""
    tensors = spec.adapter.tensors(shape).items()
    rated = any(tensor.trained and group_of(key, tensor.shape) == "B" for key, tensor in tensors)
    if spec.training.loraplus_lr_ratio is not None and not rated:
        raise UserError(
            "training.loraplus_lr_ratio: changes the learning rate of lora_B and of vectors, and a "
            f"{spec.adapter.peft_type} has neither: leave it out"
        )


def _problems_of_shape(spec: TaskSpec, shape: BackboneShape) -> Iterator[str]:
    """What of a task's fields the backbone does not have."""
    limit, virtual = shape.position_limit, spec.adapter.virtual_tokens
    if limit is not None and spec.data.max_length + virtual > limit:
        yield (
            f"data.max_length: {spec.data.max_length}{f' plus {virtual} virtual tokens' if virtual else ''} is more "
            f"than the {limit} positions of the backbone: choose at most {limit - virtual}"
        )
    if spec.training.router_aux_loss_coef and shape.experts is None:
        yield f"training.router_aux_loss_coef: balances experts, and a {shape.family} has none: leave it out"


def _open(
    spec: TaskSpec, info: BackboneInfo, files: DataFiles, say: Progress, entry: SavedTask | None
) -> Task:
    problems: list[str] = []

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UserError as error:
            problems.extend(error.problems)
            return None

    problems += _problems_of_shape(spec, info.shape)
    attempt(lambda: _check_tensors(spec, info.shape))
    if wrong := attempt(lambda: problem_of_preference(spec, info.shape)):
        problems.append(wrong)
    loss = spec.training.loss
    cut = spec.data.max_length, spec.data.truncation_side
    data = attempt(lambda: files.open(spec.data.sources, *cut, spec.data.mixing(spec.training.seed), loss))
    evaluation = None
    if (held_out := spec.eval) is not None:
        evaluation = attempt(lambda: files.open(held_out, *cut, None, loss))
        if evaluation is not None and not spec.training.is_preference:
            problems += problems_of_evaluation(spec, evaluation)
    for dataset in (data, evaluation):
        if dataset is not None:
            attempt(partial(dataset.check_tokens, info.shape.vocab))
    initial = None
    source = spec.adapter.adapter_name_or_path
    resumes = entry is not None and bool(entry.checkpoint)
    if source is not None and (not resumes or spec.training.needs_reference):
        initial = attempt(lambda: read_adapter(source, spec.adapter, info.shape))
    if problems:
        raise UserError(*problems)
    task = Task(spec, data, evaluation, initial)
    for line in continue_task(task, entry) if entry is not None else ():
        say(line)
    for dataset in (data, evaluation):
        if dataset is not None:
            for line in dataset.cut.lines(spec.data.max_length):
                say(f"{spec.name}: {dataset.path}: {line}")
    return task
