"""Runs of the engine on fake tensors at a few sizes, from which tables are solved.

Each group of signatures has tasks and a bucket of its own, so that one step runs a micro-batch of every group; each
step has records of other lengths. The last batch of an epoch is short, which tells the bytes of a sequence from those
of its rows. Where chunks are asked for, a bucket before the others cuts its micro-batches, for what copies of earlier
chunks' keys and values take; what is allocated once for all tasks falls to the first bucket.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.dry_run.depth import read_info
from megatron_mux.dry_run.run_spec import RunSpec, TaskRecords
from megatron_mux.dry_run.worst_case_batch import STEPS
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import Group
from megatron_mux.fusion.plan import Bucket, HybridTask, Plan
from megatron_mux.kernels.attention.segments import can_have_one_call
from megatron_mux.kernels.attention.short import LONGEST
from megatron_mux.memory.trace.model import configuration
from megatron_mux.tasks import TaskSpec

SHALLOW, DEEP = 2, 3
"""Layers of a stage where layers are alike: further ones are like the second of three; the last one differs, as only
labelled rows pass its attention. Two tell what lasts of a further one."""
_RECORDS = 3
"""Of a batch that is not short, on each pipeline."""
_SIZES = 4
"""Of a group's micro-batches, to tell what each storage goes by: two features would do with three."""
_SHORTEST = 256
_LONGEST = 16384
"""Tokens of a record, at most: three such fill a chunk of logits of 5,500 words or more on a rank."""
_ON_CPU = ((16, LONGEST + 1, 16), (LONGEST, 2 * LONGEST, 2 * LONGEST))
"""Least and most tokens of records on a CPU, whose attention treats short ones otherwise than long ones, in turns."""
_LITTLE = 8
"""Tokens of a record that is by itself in a call of attention."""
_LABELLED = ((0.05, 0.25), (1.1, 1.4))
"""Labels of a micro-batch as a share of a chunk of logits, in turns: it fills none, or one and a bit of the next."""

_MOST_LABELLED = (0.5, 0.9)
"""Of a record, in turns."""


@dataclass(frozen=True)
class Rehearsal:
    """A run at a few sizes.

    Attributes:
        run: With a bucket for chunks, if there are any, then one for each group.
        groups: The signatures of each bucket.
        warm: Steps before those that count: what is allocated once is there after them.
        cut: Buckets for chunks: 1 or 0.
        short: Whether it is of short sequences on a CPU.
    """

    run: RunSpec
    groups: tuple[Group, ...]
    warm: int
    cut: int = 1
    short: bool = False


def rehearsal(
    base: RunSpec,
    signatures: Sequence[Signature],
    groups: Sequence[Group],
    layers: int,
    chunk: int,
    short: bool = False,
    sized: bool = True,
    chunks: bool = True,
) -> Rehearsal:
    """The run of these groups.

    Args:
        base: Backbone, ranks, and how memory is saved; its tasks and buckets are not used.
        signatures: What tasks may be like.
        groups: Which of them share a micro-batch.
        layers: Of each stage, if the backbone has more.
        chunk: Rows whose logits are computed at once.
        short: Whether, on a CPU, its attention shall compute all sequences as short ones.
        sized: Whether micro-batches of several sizes are run; of one size tell only what lasts.
        chunks: Whether there is a bucket that cuts its micro-batches.
    """
    stages = base.plan.ranks
    whole = read_info(base.config, base.quantise).shape.layers
    config, split = base.config, base.plan.split
    if layers * stages < whole:
        config = json.loads(configuration(base.config, layers * stages).to_json_string(use_diff=False))
        split = (layers,) * stages
    sizes = _SIZES + (base.plan.data > 1)
    on_cpu, longest = base.device == "cpu", max(4 * _SHORTEST, min(chunk, _LONGEST))
    by_calls = not on_cpu and not can_have_one_call(base.itemsize, base.gpu.capability)
    if on_cpu:
        # All features at once are fitted: eleven, of which four are of long sequences, and two of each signature. With
        # just as many sizes short ones, which differ in little else than their length, are up to 2% off.
        sizes += (8 if short else 12) + 2 * max(map(len, groups))
        longest = LONGEST if short else 2 * LONGEST
        chunk = min(chunk, longest)
    if not sized:
        sizes = 1
    steps = sizes + STEPS - 1
    tasks, buckets = [], []
    generator = np.random.default_rng(0)
    seconds = (1.0,) * stages
    groups = [groups[0][:1], *groups] if chunks else groups
    for number, group in enumerate(groups):
        names = []
        log_lengths = _log_lengths(short, sizes, generator) if on_cpu else None
        for signature in group:
            name = f"{number}-{signature}"
            spec = _spec(name, signatures[signature], _RECORDS * base.plan.data, steps)
            odd = signature == group[0] and (not on_cpu or not short or base.tensor > 1)
            batches = _Batches(sizes, base.plan.data, longest, by_calls)
            tasks.append(_records(spec, batches, chunk / len(group), odd, generator, log_lengths))
            names.append(name)
        cut = longest // 2 if number == 0 and chunks else None
        buckets.append(Bucket((HybridTask(tuple(sorted(names))),), 1, cut, forward=seconds, backward=seconds))
    plan = Plan(
        "auto", stages, tuple(buckets), split=split, schedule="1f1b", tensor=base.tensor, data=base.plan.data
    )
    run = replace(base, config=config, tasks=tasks, plan=plan, steps=steps, rolling=False)
    return Rehearsal(run, tuple(groups), STEPS - 1, int(chunks), on_cpu and short)


def _spec(name: str, signature: Signature, batch: int, steps: int) -> TaskSpec:
    """A task of which so many steps are run.

    What freezes on the way takes most before: it freezes in the last of them.
    """
    sections, adapter = signature.sections, TaskSpec.model_validate(signature.task).adapter
    total = next(n for n in count(steps) if adapter.freezes_after(n) in (None, steps))
    sections["training"] |= {"per_device_train_batch_size": batch, "max_steps": total}
    data = {"path": "none", "max_length": _LONGEST, "shuffle": False}
    return TaskSpec.model_validate({"name": name, "data": data, **sections})


def _log_lengths(short: bool, sizes: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """`[2, sizes]` logarithms of the least and the most tokens of each batch's records.

    Short records have one length: attention repeats its products as often as lengths need.
    """
    if short:
        least, most = np.log(_ON_CPU[0][0]), np.log(_ON_CPU[1][0])
        return np.tile(generator.uniform(least, most, sizes), (2, 1))
    log_lengths: npt.NDArray[np.float64] = np.log(np.array(_ON_CPU, np.float64)[:, np.arange(sizes) % 3])
    return log_lengths


class _Batches(NamedTuple):
    """The batches of a task's records.

    Attributes:
        sizes: Their number, one for each size.
        pipelines: That share each.
        longest: Tokens of a record, at most.
        by_calls: Whether attention has a call for each run of sequences of one length, not one for all. Then a batch
            has two: of nearly all rows, and of a few. That bounds what attention takes at a time, and what joining the
            outputs of several calls takes besides.
    """

    sizes: int
    pipelines: int
    longest: int
    by_calls: bool


def _records(
    spec: TaskSpec,
    batches: _Batches,
    labelled: float,
    odd: bool,
    generator: np.random.Generator,
    log_lengths: npt.NDArray[np.float64] | None,
) -> TaskRecords:
    """A task with a batch for each size, one of them short.

    Args:
        labelled: Labels of the task's part of a micro-batch that fills a chunk of logits.
        odd: Whether rows are odd in number, else they are divisible by eight.
        log_lengths: `[2, sizes]` on a CPU, logarithms of the least and the most tokens of a batch's records.
    """
    sizes, pipelines, longest, by_calls = batches
    batch, together = spec.training.per_device_train_batch_size, spec.training.sequences_per_record
    short = pipelines * (1 + by_calls)
    number = (batch * (sizes - 1) + short) * together
    step = np.arange(number) // spec.sequences_per_step
    if log_lengths is not None:
        lengths = np.exp(generator.uniform(*log_lengths[:, step])).astype(int)
    else:
        lengths = generator.integers(np.where(step % 2, longest // 2, _SHORTEST) // 8, longest // 8) * 8
    # Tensor ranks that divide rows pad them, so rows of a micro-batch are never divisible, or passes would differ.
    if by_calls:
        starts = np.searchsorted(step, np.arange(sizes))
        lengths = lengths[starts][step]
        last = np.append(starts[1:], number) - 1
        lengths[last[:, None] - together * np.arange(pipelines)] = _LITTLE + odd
    else:
        lengths[::together] += odd
    share = labelled * pipelines / np.where(step < sizes - 1, batch, short) / together
    labels = share * generator.uniform(*np.array(_LABELLED)[step % 2].T)
    # If all rows of a sequence but one had labels, sequences could not be told from rows without labels.
    most = lengths * np.array(_MOST_LABELLED)[step % 2]
    return TaskRecords(spec.plain(), lengths.tolist(), np.clip(labels, 2, most).astype(int).tolist())
