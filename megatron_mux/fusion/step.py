"""From a plan and a step's lengths to what is computed: the chunks of every bucket, and the template to run it.

Pure functions of what every rank knows: the plan, and the lengths in the data's index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from megatron_mux.fusion.alignment import Chunk, Filled, Item, MicroBatchChunks, cut_into_chunks, share_out
from megatron_mux.fusion.plan import Bucket, Plan
from megatron_mux.pipeline.action import ChunkId
from megatron_mux.pipeline.bucket import BucketCost, forward_order
from megatron_mux.pipeline.structured import structured, warmup_microbatches
from megatron_mux.pipeline.template import (
    Template,
    fits_interleaved,
    gpipe,
    interleaved,
    one_f_one_b,
    with_updates,
)


@dataclass(frozen=True)
class Lengths:
    """The sequences of one task's step.

    Attributes:
        labels: Labelled tokens of each.
        pad_to: Each is padded to so many tokens; 0: not at all.
        together: Neighbours that are in the same micro-batch, since their losses are coupled: those of a pair.
    """

    tokens: tuple[int, ...]
    labels: tuple[int, ...]
    pad_to: int = 0
    together: int = 1


@dataclass(frozen=True)
class StepChunks:
    """What one pipeline computes in one step.

    Attributes:
        chunks: For each chunk, what each hybrid task of its bucket has in it; those with nothing are left out. Behind
            them there may be empty ones, see `lockstep`.
        sizes: For each bucket, the chunks of each of its micro-batches.
    """

    chunks: Mapping[ChunkId, tuple[Chunk, ...]]
    sizes: tuple[tuple[int, ...], ...]


def step_chunks(plan: Plan, lengths: Mapping[str, Lengths], data_rank: int = 0) -> StepChunks:
    """The chunks of a step on one of the plan's pipelines.

    Args:
        plan: Says which tasks share what, in how many micro-batches, cut how.
        lengths: Of every task of the plan.
    """
    chunks: dict[ChunkId, tuple[Chunk, ...]] = {}
    sizes: list[tuple[int, ...]] = []
    filled = Filled(plan.data)
    for b, bucket in enumerate(plan.buckets):
        filled.next_bucket(bucket.micro_batches)
        of_hybrids: list[Sequence[MicroBatchChunks]] = [
            cut_into_chunks(_items(plan, hybrid.tasks, lengths), bucket.chunk, filled, data_rank)
            for hybrid in bucket.hybrid_tasks
        ]
        if bucket.halves:
            of_hybrids = [half for whole in of_hybrids for half in _halves(plan, whole, lengths)]
        counts: list[int] = []
        for side_by_side in zip(*of_hybrids, strict=True):
            if not any(side_by_side):
                continue
            m = len(counts)
            counts.append(max(len(micro_batch) for micro_batch in side_by_side))
            for c in range(counts[-1]):
                chunks[ChunkId(b, m, c)] = tuple(batch[c] for batch in side_by_side if c < len(batch))
        sizes.append(tuple(counts))
    return StepChunks(chunks, tuple(sizes))


def _halves(
    plan: Plan, micro_batches: Sequence[MicroBatchChunks], lengths: Mapping[str, Lengths]
) -> tuple[list[MicroBatchChunks], list[MicroBatchChunks]]:
    """The micro-batches of a hybrid task, whose packs are not cut, split in two of nearly equal cost."""
    first: list[MicroBatchChunks] = []
    second: list[MicroBatchChunks] = []
    for micro_batch in micro_batches:
        pieces = [piece for chunk in micro_batch for piece in chunk]
        costs = [
            plan.weights.of(piece.tokens, lengths[piece.task].labels[piece.sequence]) for piece in pieces
        ]
        first_half, other = (tuple(half) for half in share_out(pieces, costs, [0.0, 0.0]))
        first.append((first_half,) if first_half else ())
        second.append((other,) if other else ())
    return first, second


def must_keep_step(plan: Plan) -> bool:
    """Whether pipelines whose sizes differ might wait for each other for ever.

    A bucket's gradients are summed over pipelines where it ends. With several stages to a rank a rank's other stages
    may be in between, and differently so on pipelines with other sizes.
    """
    return plan.data > 1 and plan.virtual > 1


def lockstep(steps: Sequence[StepChunks]) -> list[StepChunks]:
    """The chunks of all pipelines with equal sizes, for pipelines that must make the same passes at the same time.

    Args:
        steps: Of the same step, a pipeline each.

    Returns:
        The same chunks, filled up: where only others have something to compute there are empty chunks.
    """
    sizes = tuple(
        tuple(max(chunks) for chunks in zip_longest(*micro_batches, fillvalue=0))
        for micro_batches in zip(*(step.sizes for step in steps), strict=True)
    )
    most = {
        chunk_id: max(len(step.chunks.get(chunk_id, ())) for step in steps)
        for chunk_id in forward_order(sizes)
    }
    filled = []
    for step in steps:
        cut = {chunk_id: step.chunks.get(chunk_id, ()) for chunk_id in most}
        chunks = {
            chunk_id: cut[chunk_id] + ((),) * (count - len(cut[chunk_id])) for chunk_id, count in most.items()
        }
        filled.append(StepChunks(chunks, sizes))
    return filled


def _items(plan: Plan, tasks: Sequence[str], lengths: Mapping[str, Lengths]) -> list[Item]:
    items: list[Item] = []
    for name in tasks:
        of_task = lengths[name]
        for i, (tokens, labels) in enumerate(zip(of_task.tokens, of_task.labels, strict=True)):
            padded = max(tokens, of_task.pad_to)
            items.append(Item(name, i, padded, plan.weights.of(padded, labels), i // of_task.together))
    return items


def step_template(plan: Plan, sizes: Sequence[Sequence[int]]) -> Template:
    """The actions of one or several steps on every rank, those that end the buckets' steps included.

    The planner's plans know what passes take, and what they keep: theirs is the structured multi-bucket template. So is
    that of others, as if all passes took the same, with `warmup_microbatches` and no more. A plan may ask for another
    schedule: `1f1b`; or, a step at a time, `gpipe` and, for steps whose micro-batches allow it, `interleaved`.

    Args:
        sizes: From `step_chunks`; of several steps, one after the other.
    """
    period = len(plan.buckets)
    passes = _passes(plan, sizes, period)
    return with_updates(passes, sizes, period, plan.stages)


def is_structured(plan: Plan, sizes: Sequence[Sequence[int]]) -> bool:
    """Whether `step_template` of these sizes is the structured one on the plan's own costs."""
    if plan.virtual == 1 and plan.schedule in ("gpipe", "1f1b"):
        return False
    if plan.schedule == "interleaved" and fits_interleaved(plan.ranks, sizes):
        return False
    return plan.policy == "auto" and all(bucket.forward for bucket in plan.buckets)


def _passes(plan: Plan, sizes: Sequence[Sequence[int]], period: int) -> Template:
    single = plan.virtual == 1
    if plan.schedule == "gpipe" and single:
        return gpipe(plan.stages, sizes)
    if plan.schedule == "interleaved" and fits_interleaved(plan.ranks, sizes):
        return interleaved(plan.ranks, plan.virtual, sizes)
    if single and plan.schedule == "1f1b":
        return one_f_one_b(plan.stages, sizes, period)
    if is_structured(plan, sizes):
        costs = [bucket_costs(bucket) for bucket in plan.buckets]
        return structured(costs, plan.activation_limit or None, sizes, plan.virtual)
    # As if all passes took the same; about as many in flight as interleaved 1F1B has.
    equal = (1.0,) * plan.stages
    alike = []
    for index, bucket in enumerate(plan.buckets):
        chunks = max((max(counts, default=1) for counts in sizes[index::period]), default=1)
        alike.append(BucketCost(bucket.micro_batches, equal, equal, memory=(1 / chunks,) * plan.stages))
    behind = range(plan.stages - 1, -1, -1)
    limit = (
        [float(warmup_microbatches(count)) for count in behind]
        if single
        else [2.0 * plan.stages] * plan.ranks
    )
    return structured(alike, limit, sizes, plan.virtual)


def bucket_costs(bucket: Bucket) -> BucketCost:
    """What the pipeline knows of a planned bucket."""
    return BucketCost(
        micro_batches=bucket.micro_batches,
        forward=bucket.forward,
        backward=bucket.backward,
        chunks=max(bucket.chunks, default=1),
        memory=bucket.memory,
        transfer=bucket.transfer,
    )
