"""The tasks of a run as they are rehearsed: with their heaviest batch, for a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_mux.data.sampler import Sampler
from megatron_mux.rehearsal.setting import Cast, Lengths
from megatron_mux.tasks import TaskSpec

STEPS, STEPS_THAT_PRUNE = 2, 3
"""In the second one all that lasts is there; diff pruning fixes its masks after it, and keeps them in a third one."""

PASS = 2048
"""Tokens of an evaluation's pass: `engine.evaluate.TOKENS_PER_PASS`."""
_MOST_RECORDS = 2_000_000
"""Of all steps together, that are looked at."""


@dataclass(frozen=True)
class Batch:
    """Sequences of a step, or of an evaluation.

    Attributes:
        lengths: Tokens of each.
        labels: Labelled tokens of each.
    """

    lengths: tuple[int, ...]
    labels: tuple[int, ...]


def longest(spec: TaskSpec, sequences: int | None = None) -> Batch:
    """The heaviest that a task's batch may be, whatever its data are: full length, labelled throughout.

    Args:
        spec: The task.
        sequences: How many; None for a step's.
    """
    lengths = (spec.data.max_length,) * (sequences or spec.sequences_per_step)
    return Batch(lengths, lengths)


def heaviest(spec: TaskSpec, data: Lengths) -> Batch:
    """The batch of a task's step with most tokens, with at least as many labels as any step has.

    Where there are too many steps to look at, its longest records.

    Args:
        spec: The task.
        data: Its training records.
    """
    lengths, labels = np.asarray(data.lengths), np.asarray(data.label_counts)
    total = spec.total_steps(len(lengths))
    count = min(spec.sequences_per_step, len(lengths))
    if total * count > _MOST_RECORDS:
        chosen = np.argsort(-lengths, kind="stable")[:count]
        most = int(np.sort(labels)[-count:].sum())
    else:
        sampler = Sampler(len(lengths), spec.sequences_per_step, spec.training.seed, spec.data.shuffle)
        batches = [np.array(sampler.batch(step)) for step in range(total)]
        chosen = max(batches, key=lambda own: (int(lengths[own].sum()), int(lengths[own].max())))
        most = max(int(labels[own].sum()) for own in batches)
    return Batch(tuple(map(int, lengths[chosen])), _at_least(lengths[chosen], labels[chosen], most))


def steps_of(specs: Sequence[TaskSpec]) -> int:
    """How many steps of these tasks are rehearsed."""
    prune = any(spec.adapter.peft_type == "DIFF_PRUNING" for spec in specs)
    return STEPS_THAT_PRUNE if prune else STEPS


def densest(data: Lengths) -> Batch:
    """The records that make an evaluation's pass heaviest: those with most labels for their tokens, then the longest.

    (Where records are classified, a pass has them with other records' completions: of this file, too.)

    Args:
        data: Held-out records.
    """
    lengths, labels = np.asarray(data.lengths), np.asarray(data.label_counts)
    order = np.argsort(-labels / lengths, kind="stable")
    count = int(np.searchsorted(np.cumsum(lengths[order]), PASS)) + 1
    chosen = [*order[:count], int(lengths.argmax())]
    return Batch(tuple(map(int, lengths[chosen])), tuple(map(int, labels[chosen])))


def cast(spec: TaskSpec, batch: Batch, held_out: Batch | None, stages: int, pipelines: int) -> Cast:
    """A task as it is rehearsed, evaluated if it has held-out records: with as many passes as fill the pipelines.

    Args:
        spec: The task.
        batch: Of each of its steps.
        held_out: A full pass of its evaluation.
        stages: Of a pipeline.
        pipelines: That share the records.
    """
    plain = spec.plain()
    # Fewer steps than it has, so that what happens at a certain share of them does.
    training = {**plain["training"], "max_steps": STEPS_THAT_PRUNE, "num_train_epochs": None}
    training |= {"warmup_steps": 0, "warmup_ratio": 0.0}
    task = {**plain, "training": training}
    if held_out is None:
        return Cast(task, batch.lengths, batch.labels)
    # Each pipeline has every so many-th record.
    lengths, labels = (
        [size for size in sizes for _ in range(pipelines)] * (stages + 1)
        for sizes in (held_out.lengths, held_out.labels)
    )
    return Cast(task, batch.lengths, batch.labels, lengths, labels)


def _at_least(lengths: npt.NDArray[np.int32], labels: npt.NDArray[np.int32], most: int) -> tuple[int, ...]:
    """Labels of each record, raised as far as there are tokens until there are so many."""
    found, missing = [], most - int(labels.sum())
    for length, own in zip(lengths.tolist(), labels.tolist(), strict=True):
        more = max(0, min(length - own, missing))
        found.append(own + more)
        missing -= more
    return tuple(found)
