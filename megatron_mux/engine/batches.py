"""From a task's records to the micro-batches of a step: which lengths it has, what lies in each chunk, the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megatron_mux import layout
from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.engine.together import first_problem
from megatron_mux.errors import UserError
from megatron_mux.fusion.alignment import Chunk
from megatron_mux.fusion.step import Lengths, StepGrid
from megatron_mux.kernels.carry import Carry
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.pipeline.action import Unit
from megatron_mux.runtime import Parallel


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """An example's tokens `[L]` int64 and which of them are labels `[L]` bool."""
    return (
        torch.from_numpy(np.asarray(example.tokens, dtype=np.int64)),
        torch.from_numpy(np.asarray(example.labelled, dtype=np.bool_)),
    )


def lengths_of(data: TaskDataset, records: Sequence[int], pad_to: int = 0) -> Lengths:
    """What the data's index says of the records of a step: the same on every rank, without reading them."""
    chosen = list(records)
    return Lengths(tuple(data.lengths[chosen].tolist()), tuple(data.label_counts[chosen].tolist()), pad_to)


def weighted(name: str, data: TaskDataset, records: Sequence[int], pad_to: int = 0) -> list[PackedSequence]:
    """The sequences of a task's step, weighted so that its loss is the mean over their labels.

    Args:
        name: The task.
        data: Its training records.
        records: Which of them the step takes.
        pad_to: Put tokens that are no labels behind shorter sequences, up to so many in all; none of the sequence's
            own tokens sees them.

    Raises:
        UserError: The data cannot be read any more.
    """
    examples = [tensors(data[i]) for i in records]
    labels = sum(int(labelled[1:].sum()) for _, labelled in examples)
    padded = [(_padded(ids, pad_to), _padded(labelled, pad_to)) for ids, labelled in examples]
    return [(name, i, ids, labelled, 1.0 / labels) for i, (ids, labelled) in enumerate(padded)]


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(length - x.shape[0])]) if x.shape[0] < length else x


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
    grid: StepGrid,
    fetched: Mapping[str, list[PackedSequence]],
    steps: Mapping[str, int],
    offsets: Mapping[str, int],
    parallel: Parallel,
) -> dict[Unit, tuple[MicroBatch, ...]]:
    """Lay out what this pipeline computes in a step.

    Args:
        grid: What lies in each chunk.
        fetched: Each task's sequences over all pipelines.
        steps: Optimizer steps each task has done.
        offsets: Virtual tokens in front of each task's sequences.
        parallel: Where this rank stands.

    Returns:
        For each unit, a batch for each hybrid task that has something in it.
    """
    names = tuple(fetched)
    multiple = parallel.tp_size if parallel.sequence_parallel else 1
    # Keys and values wait for later chunks of the same micro-batch only.
    carries = {(unit.bucket, unit.micro_batch): Carry() for unit in grid.chunks if unit.chunk}

    def pack(unit: Unit, chunk: Chunk) -> MicroBatch:
        return layout.pack(
            [fetched[s.task][s.sequence] for s in chunk],
            names,
            steps,
            offsets,
            multiple,
            training=True,
            device=parallel.device,
            spans=[(s.start, s.stop) for s in chunk],
            carry=carries.get((unit.bucket, unit.micro_batch)),
        )

    return {unit: tuple(pack(unit, chunk) for chunk in chunks) for unit, chunks in grid.chunks.items()}
