"""Held-out loss and accuracy of one task, over the same pipeline that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_mux import layout
from megatron_mux.backbone.model import Backbone
from megatron_mux.data.dataset import Example, TaskDataset
from megatron_mux.engine.compute import EvaluationCompute
from megatron_mux.errors import UserError
from megatron_mux.layout import MicroBatch, PackedSequence
from megatron_mux.pipeline.communicate import Communicator
from megatron_mux.pipeline.execute import execute
from megatron_mux.pipeline.template import forward_only
from megatron_mux.runtime import Parallel

# Tokens of one forward pass: large enough to use the processor well, small enough to bound activations.
TOKENS_PER_PASS = 2048


@dataclass(frozen=True)
class EvalResult:
    """What one evaluation found.

    Attributes:
        loss: Mean negative log-likelihood over labelled tokens.
        accuracy: With at most 16 distinct completions, the share of records whose own completion is the likeliest;
            else the share of labelled tokens predicted, end-of-sequence left out.
        records: Records evaluated.
    """

    loss: float
    accuracy: float
    records: int


def evaluate(
    backbone: Backbone,
    parallel: Parallel,
    communicator: Communicator,
    task: str,
    dataset: TaskDataset,
    position_offset: int,
    steps_done: int,
    batch_size: int | None = None,
) -> EvalResult:
    """Evaluate `task` on `dataset`; every rank calls it and every rank gets the answer.

    Args:
        backbone: This stage, with the task's adapter attached.
        parallel: Where this rank stands; records are shared out over data-parallel ranks.
        communicator: This stage's transfers.
        task: The task's name.
        dataset: Held-out records.
        position_offset: The task's number of virtual tokens.
        steps_done: The task's optimizer steps so far.
        batch_size: Most sequences of one pass; None is bound by tokens alone.

    Returns:
        Loss and accuracy.
    """
    choices = dataset.distinct_completions
    candidates = len(choices) if choices else 1
    count = len(dataset)
    mine = range(parallel.dp_rank, count, parallel.dp_size)
    totals = torch.zeros(count * candidates, 4, dtype=torch.float64, device=parallel.device)
    own = torch.zeros(count, dtype=torch.int64)
    pending = _sequences(dataset, mine, choices, own)
    multiple = parallel.tp_size if parallel.sequence_parallel else 1

    def pack(sequences: list[PackedSequence]) -> MicroBatch:
        offset = {task: position_offset}
        return layout.pack(
            sequences, (task,), {task: steps_done}, offset, multiple, training=False, device=parallel.device
        )

    problem = ""
    try:
        batches, ids = _batches(pending, task, pack, batch_size)
    except UserError as error:
        problem = str(error)
    if parallel.total([bool(problem)])[0]:
        raise UserError(problem or "another process could not read the evaluation data")
    compute = EvaluationCompute(backbone, batches, len(ids), parallel.is_last_stage, dataset.end_of_sequence)
    execute(forward_only(parallel.pp_rank, len(batches)), compute, communicator, backbone.dtype)
    if ids and parallel.is_last_stage and parallel.tp_rank == 0:
        totals[torch.tensor(ids, device=parallel.device)] = compute.sums
    if parallel.world_size > 1:
        dist.all_reduce(totals)
        own = own.to(parallel.device)
        if parallel.dp_size > 1:
            dist.all_reduce(own, group=parallel.dp_group)
    table = totals.cpu().view(count, candidates, 4)
    chosen = table[torch.arange(count), own.cpu()]
    loss = float(chosen[:, 0].sum() / chosen[:, 1].sum())
    if choices:
        accuracy = float((table[:, :, 0].argmin(dim=1) == own.cpu()).double().mean())
    else:
        accuracy = float(chosen[:, 2].sum() / chosen[:, 3].sum().clamp(min=1))
    return EvalResult(loss, accuracy, count)


def _sequences(
    dataset: TaskDataset, records: range, choices: list[str] | None, own: torch.Tensor
) -> Iterator[tuple[int, Example]]:
    """Each record's sequences with their place in the table: itself, or itself with every completion."""
    for record in records:
        if not choices:
            yield record, dataset[record]
            continue
        for k, (example, is_own) in enumerate(dataset.candidates(record)):
            if is_own:
                own[record] = k
            yield record * len(choices) + k, example


def _batches(
    sequences: Iterator[tuple[int, Example]],
    task: str,
    pack: Callable[[list[PackedSequence]], MicroBatch],
    batch_size: int | None,
) -> tuple[list[MicroBatch], list[int]]:
    """Micro-batches of at most `TOKENS_PER_PASS` tokens, and the table place of each sequence id."""
    ids: list[int] = []
    batches: list[MicroBatch] = []
    current: list[PackedSequence] = []
    tokens = 0
    for place, example in sequences:
        length = len(example.tokens)
        if current and (tokens + length > TOKENS_PER_PASS or len(current) == batch_size):
            batches.append(pack(current))
            current, tokens = [], 0
        current.append((task, len(ids), *tensors(example), 1.0))
        ids.append(place)
        tokens += length
    if current:
        batches.append(pack(current))
    return batches, ids


def tensors(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """An example's tokens `[L]` int64 and which of them are labels `[L]` bool."""
    return (
        torch.from_numpy(np.asarray(example.tokens, dtype=np.int64)),
        torch.from_numpy(np.asarray(example.labelled, dtype=np.bool_)),
    )
