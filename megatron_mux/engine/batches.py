"""From a task's records to the micro-batches of a step: read, weighted, shared out over pipelines, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron_mux import layout
from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.engine.compute import BatchKey
from megatron_mux.engine.together import first_problem
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import share_out
from megatron_mux.fusion.plan import Plan
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.runtime import Parallel


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """An example's tokens `[L]` int64 and which of them are labels `[L]` bool."""
    return (
        torch.from_numpy(np.asarray(example.tokens, dtype=np.int64)),
        torch.from_numpy(np.asarray(example.labelled, dtype=np.bool_)),
    )


def weighted(name: str, data: TaskDataset, records: Sequence[int]) -> list[PackedSequence]:
    """The sequences of a task's step, weighted so that its loss is the mean over their labels.

    Args:
        name: The task.
        data: Its training records.
        records: Which of them the step takes.

    Raises:
        UserError: The data cannot be read any more.
    """
    examples = [tensors(data[i]) for i in records]
    labels = sum(int(labelled[1:].sum()) for _, labelled in examples)
    return [(name, i, ids, labelled, 1.0 / labels) for i, (ids, labelled) in enumerate(examples)]


def read_together(
    names: Sequence[str], read: Callable[[str], list[PackedSequence]], parallel: Parallel
) -> tuple[dict[str, list[PackedSequence]], dict[str, str]]:
    """Read each task's next batch; data that cannot be read on some rank count as unreadable on all of them.

    Args:
        names: The tasks of the step.
        read: Gives a task's sequences; a `UserError` says why it cannot.
        parallel: Where this rank stands.

    Returns:
        The sequences of the tasks that can go on, and of the others what is wrong: the same tasks on every rank.
    """
    sequences: dict[str, list[PackedSequence]] = {}
    problems: dict[str, str] = {}
    for name in names:
        try:
            sequences[name] = read(name)
        except UserError as error:
            problems[name] = str(error)
    unreadable: dict[str, str] = {}
    counts = parallel.total([name in problems for name in names])
    for name, count in zip(names, counts, strict=True):
        if count:
            sequences.pop(name, None)
            unreadable[name] = first_problem(problems.get(name, ""), parallel)
    return sequences, unreadable


def micro_batches(
    plan: Plan,
    fetched: Mapping[str, list[PackedSequence]],
    steps: Mapping[str, int],
    offsets: Mapping[str, int],
    parallel: Parallel,
) -> tuple[dict[BatchKey, MicroBatch], dict[str, int]]:
    """Pack this pipeline's part of a step.

    Args:
        plan: Which tasks share a bucket, and its micro-batches.
        fetched: Each task's sequences over all pipelines.
        steps: Optimizer steps each task has done.
        offsets: Virtual tokens in front of each task's sequences.
        parallel: Where this rank stands.

    Returns:
        The micro-batches, and the tokens of each task over all pipelines.
    """
    multiple = parallel.tp_size if parallel.sequence_parallel else 1
    batches: dict[BatchKey, MicroBatch] = {}
    tokens: dict[str, int] = {}
    for b, bucket in enumerate(plan.buckets):
        sequences: list[PackedSequence] = []
        for name in bucket.tasks:
            tokens[name] = sum(int(s[2].shape[0]) for s in fetched[name])
            sequences += fetched[name]
        mine = _shares(sequences, parallel.dp_size)[parallel.dp_rank]
        filled = [part for part in _shares(mine, bucket.micro_batches) if part]
        for m, part in enumerate(filled):
            batches[b, m] = layout.pack(
                part, plan.tasks, steps, offsets, multiple, training=True, device=parallel.device
            )
    return batches, tokens


def _shares(sequences: list[PackedSequence], parts: int) -> list[list[PackedSequence]]:
    """Sequences shared out by tokens, each task evenly."""
    if parts == 1:
        return [sequences]
    groups = {name: i for i, name in enumerate(dict.fromkeys(s[0] for s in sequences))}
    return share_out(
        sequences, [int(s[2].shape[0]) for s in sequences], [groups[s[0]] for s in sequences], parts
    )
