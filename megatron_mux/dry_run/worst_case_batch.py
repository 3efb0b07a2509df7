"""Tasks as a dry run trains them: a few steps, each with the worst-case batch of the task's data, or an upper bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_mux.data.sampler import Sampler
from megatron_mux.dry_run.run_spec import RecordLengths, TaskRecords
from megatron_mux.errors import UserError
from megatron_mux.tasks import TaskSpec
from megatron_mux.tasks.evaluation import TOKENS_PER_PASS

if TYPE_CHECKING:
    from megatron_mux.data.dataset import DataFiles

STEPS, STEPS_THAT_PRUNE = 2, 3
"""From the second step on all persistent tensors exist; diff pruning fixes its masks after it, so takes a third."""

_MOST_RECORDS = 2_000_000
"""Records of all steps together; beyond that, steps are not enumerated."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Batch:
    """Lengths of the sequences of a step or an evaluation."""

    lengths: tuple[int, ...]
    labels: tuple[int, ...]


def worst_case_batches(
    specs: Sequence[TaskSpec], backbone: Path
) -> tuple[list[tuple[Batch, Batch | None]], list[str]]:
    """Find the worst-case batches of tasks.

    Args:
        backbone: Directory of config.json and, to read data, of the tokenizer.

    Returns:
        Each task's step batch, and its evaluation pass if it is evaluated; names of tasks whose data could not be read.

    Raises:
        UserError: Lists all problems of the data.
    """
    found: list[tuple[Batch, Batch | None]] = []
    unread: list[str] = []
    problems: list[str] = []
    can_read = any((backbone / name).is_file() for name in _TOKENIZER)

    @cache
    def files() -> DataFiles:
        from megatron_mux.data.dataset import DataFiles  # takes seconds to import
        from megatron_mux.data.tokenizer import load_tokenizer

        return DataFiles(load_tokenizer(backbone), lambda line: None)

    def chosen(
        spec: TaskSpec, held_out: bool, choose: Callable[[RecordLengths], Batch], bound: Batch
    ) -> Batch:
        sources = [spec.eval] if held_out and spec.eval is not None else spec.data.sources
        paths = [path for source in sources for path in source.paths]
        if can_read and all(map(_is_there, paths)):
            mixing = None if held_out else spec.data.mixing(spec.training.seed)
            cut, loss = (spec.data.max_length, spec.data.truncation_side), spec.training.loss
            with closing(files().open(sources, *cut, mixing, loss)) as data:
                return choose(data)
        unread.append(spec.name)
        return bound

    for spec in specs:
        try:
            step = chosen(spec, False, partial(worst_case, spec), longest(spec))
            evaluation = None
            if spec.eval is not None:
                bound = longest(spec, -(-TOKENS_PER_PASS // spec.data.max_length))
                evaluation = chosen(spec, True, densest, bound)
            found.append((step, evaluation))
        except UserError as error:
            problems += [f"task {spec.name!r}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return found, list(dict.fromkeys(unread))


def _is_there(path: Path) -> bool:
    return path.exists() or next(iglob(str(path), recursive=True), None) is not None


def longest(spec: TaskSpec, sequences: int | None = None) -> Batch:
    """Upper bound of a task's batch without its data: every sequence at full length, all tokens labelled.

    Args:
        sequences: Number of sequences; None for those of one step.
    """
    lengths = (spec.data.max_length,) * (sequences or spec.sequences_per_step)
    return Batch(lengths, lengths)


def worst_case(spec: TaskSpec, data: RecordLengths) -> Batch:
    """The step's batch with the most tokens, with at least as many labels as any step has.

    With too many steps to enumerate, the longest records form the batch.
    """
    lengths, labels = np.asarray(data.lengths), np.asarray(data.label_counts)
    total = spec.total_steps(len(lengths))
    count = min(spec.sequences_per_step, len(lengths))
    if total * count > _MOST_RECORDS:
        chosen = np.argsort(-lengths, kind="stable")[:count]
        most = int(np.sort(labels)[-count:].sum())
    else:
        together = spec.training.sequences_per_record
        seed, shuffle = spec.training.seed, spec.data.shuffle
        sampler = Sampler(len(lengths), spec.sequences_per_step, seed, shuffle, together)
        batches = [np.array(sampler.batch(step)) for step in range(total)]
        chosen = max(batches, key=lambda own: (int(lengths[own].sum()), int(lengths[own].max())))
        most = max(int(labels[own].sum()) for own in batches)
    return Batch(tuple(map(int, lengths[chosen])), _at_least(lengths[chosen], labels[chosen], most))


def steps_of(specs: Sequence[TaskSpec]) -> int:
    """Number of steps a dry run of these tasks takes."""
    prune = any(spec.adapter.acts_in_steps for spec in specs)
    return STEPS_THAT_PRUNE if prune else STEPS


def densest(data: RecordLengths) -> Batch:
    """Records of the heaviest evaluation pass: those with the most labels per token, then the longest.

    (Where records are classified, a pass has them with other records' completions: of this file, too.)
    """
    lengths, labels = np.asarray(data.lengths), np.asarray(data.label_counts)
    order = np.argsort(-labels / lengths, kind="stable")
    count = int(np.searchsorted(np.cumsum(lengths[order]), TOKENS_PER_PASS)) + 1
    chosen = [*order[:count], int(lengths.argmax())]
    return Batch(tuple(map(int, lengths[chosen])), tuple(map(int, labels[chosen])))


def task_records(
    spec: TaskSpec, batch: Batch, held_out: Batch | None, stages: int, pipelines: int
) -> TaskRecords:
    """A task for a dry run; its evaluation has enough passes to fill the pipelines.

    Args:
        batch: Of each of its steps.
        held_out: A full pass of its evaluation.
        pipelines: That share the records.
    """
    plain = spec.plain()
    # Fewer steps than it has, so that what happens at a certain share of them does.
    training = {**plain["training"], "max_steps": STEPS_THAT_PRUNE, "num_train_epochs": None}
    training |= {"warmup_steps": 0, "warmup_ratio": 0.0}
    task = {**plain, "training": training}
    if held_out is None:
        return TaskRecords(task, batch.lengths, batch.labels)
    # Each pipeline has every so many-th record.
    lengths, labels = (
        [size for size in sizes for _ in range(pipelines)] * (stages + 1)
        for sizes in (held_out.lengths, held_out.labels)
    )
    return TaskRecords(task, batch.lengths, batch.labels, lengths, labels)


def _at_least(lengths: npt.NDArray[np.int32], labels: npt.NDArray[np.int32], most: int) -> tuple[int, ...]:
    """Labels of each record, raised (up to its length) until their sum reaches `most`."""
    found, missing = [], most - int(labels.sum())
    for length, own in zip(lengths.tolist(), labels.tolist(), strict=True):
        more = max(0, min(length - own, missing))
        found.append(own + more)
        missing -= more
    return tuple(found)
