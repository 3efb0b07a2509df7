"""From task specs to tasks ready to register: data, targets and initial adapters, checked before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from megatron_mux.adapters.peft_format import read_adapter, resolve_targets
from megatron_mux.backbone.registry import BackboneInfo
from megatron_mux.data.dataset import TaskDataset
from megatron_mux.engine import Task
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec

Progress = Callable[[str], None]


def prepare(
    specs: Sequence[TaskSpec],
    info: BackboneInfo,
    tokenizer: Any,
    say: Progress,
    resumed: Collection[str] = (),
) -> list[Task]:
    """Open every task's data and check it against the backbone.

    Args:
        specs: Validated tasks.
        info: The backbone's shape and module names.
        tokenizer: The backbone's tokenizer.
        say: Told what is going on, a line at a time.
        resumed: Names of tasks that continue from a checkpoint and need no adapter to start from.

    Returns:
        The tasks in the same order.

    Raises:
        UserError: With the problems of all tasks.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    for spec in specs:
        try:
            tasks.append(_prepare(spec, info, tokenizer, say, spec.name in resumed))
        except UserError as error:
            problems += [f"task {spec.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return tasks


def _prepare(spec: TaskSpec, info: BackboneInfo, tokenizer: Any, say: Progress, resumed: bool) -> Task:
    problems: list[str] = []

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UserError as error:
            problems.extend(error.problems)
            return None

    limit = info.shape.position_limit
    virtual = int(getattr(spec.adapter, "num_virtual_tokens", 0))
    if limit is not None and spec.data.max_length + virtual > limit:
        problems.append(
            f"data.max_length: {spec.data.max_length}{f' plus {virtual} virtual tokens' if virtual else ''} is more "
            f"than the {limit} positions of the backbone: choose at most {limit - virtual}"
        )
    attempt(lambda: resolve_targets(spec.adapter, info))
    data = attempt(lambda: TaskDataset(spec.data.path, tokenizer, spec.data.max_length))
    evaluation = None
    if spec.eval is not None:
        path = spec.eval.path
        evaluation = attempt(lambda: TaskDataset(path, tokenizer, spec.data.max_length))
    initial = None
    source = spec.adapter.adapter_name_or_path
    if source is not None and not resumed:
        initial = attempt(lambda: read_adapter(source, spec.adapter, info))
    if problems:
        raise UserError(*problems)
    for dataset in (data, evaluation):
        if dataset is not None and dataset.dropped:
            say(
                f"{spec.name}: {dataset.path}: {dataset.dropped} of {dataset.dropped + len(dataset)} records have no "
                f"token to learn from within {spec.data.max_length} tokens and were dropped"
            )
    return Task(spec, data, evaluation, initial)
