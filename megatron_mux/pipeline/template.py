"""Templates: which actions each rank computes, in which order.

A template is data: one list of actions per rank, the same on every rank, written down before anything runs. All of
them keep every stage's passes in one order (first in, first out), so that neighbours agree on the order of transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from megatron_mux.pipeline.action import Action, ChunkId
from megatron_mux.pipeline.bucket import Sizes, backward_order, forward_order

Template = tuple[tuple[Action, ...], ...]
"""One list of actions per rank."""


def plain(micro_batches: Sequence[int], chunks: int = 1) -> list[list[int]]:
    """Sizes of buckets whose micro-batches all have the same number of chunks."""
    return [[chunks] * count for count in micro_batches]


def gpipe(stages: int, sizes: Sizes) -> Template:
    """All forward passes, then all backward passes (Huang et al., 2019).

    Args:
        sizes: Chunks of the micro-batches of each bucket, in the order in which buckets enter.
    """
    return tuple(
        tuple(_forwards(stage, forward_order(sizes)) + _backwards(stage, backward_order(sizes)))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, sizes: Sizes, period: int | None = None) -> Template:
    """1F1B (Narayanan et al., 2019) over the micro-batches of all buckets in a row, with no flush between buckets.

    A stage launches one forward for each stage after it, then alternates, then drains. The first backward of a pack
    waits for the forward of its last chunk.

    Args:
        sizes: Chunks of the micro-batches of each bucket, in the order in which buckets enter.
        period: Number of buckets in a step, if there are several steps. A bucket's step starts after its previous one.
    """
    forward, backward = forward_order(sizes), backward_order(sizes)
    # Forwards that must have run before each backward: those of its own pack, and as many as backwards so far.
    last = {(chunk_id.bucket, chunk_id.micro_batch): i for i, chunk_id in enumerate(forward)}
    needed = [max(i, last[chunk_id.bucket, chunk_id.micro_batch]) + 1 for i, chunk_id in enumerate(backward)]
    # Forwards that may have run by then: none of a bucket's next step.
    ends = list(accumulate(sum(chunks) for chunks in sizes))
    ahead = (period or len(sizes)) - 1
    most = [ends[min(chunk_id.bucket + ahead, len(sizes) - 1)] for chunk_id in backward]
    return tuple(
        tuple(
            _alternate(
                stage,
                forward,
                backward,
                [min(count + stages - 1 - stage, limit) for count, limit in zip(needed, most, strict=True)],
            )
        )
        for stage in range(stages)
    )


def interleaved(ranks: int, virtual: int, sizes: Sizes) -> Template:
    """Interleaved 1F1B (Narayanan et al., 2021): `virtual` stages per rank, stage `s` on rank `s % ranks`.

    Args:
        sizes: Micro-batches of one chunk each; their total must be a multiple of the number of ranks.

    Raises:
        ValueError: The sizes do not meet these conditions.
    """
    if virtual == 1:
        return one_f_one_b(ranks, sizes)
    chunk_ids = forward_order(sizes)
    if not fits_interleaved(ranks, sizes):
        raise ValueError(
            f"interleaved 1F1B needs a multiple of {ranks} micro-batches, one per rank, that are not cut into chunks"
        )
    return tuple(tuple(_interleaved(rank, ranks, virtual, chunk_ids)) for rank in range(ranks))


def fits_interleaved(ranks: int, sizes: Sizes) -> bool:
    """Whether `interleaved` can schedule these buckets."""
    chunk_ids = forward_order(sizes)
    return not len(chunk_ids) % ranks and not any(chunk_id.chunk for chunk_id in chunk_ids)


def forward_only(ranks: int, micro_batches: int, virtual: int = 1) -> Template:
    """Forward passes only (evaluation), in groups of as many micro-batches as there are ranks."""
    chunk_ids = forward_order(plain([micro_batches]))
    groups = [chunk_ids[i : i + ranks] for i in range(0, len(chunk_ids), ranks)]
    return tuple(
        tuple(
            action
            for group in groups
            for stage in range(rank, ranks * virtual, ranks)
            for action in _forwards(stage, group)
        )
        for rank in range(ranks)
    )


def with_updates(template: Template, sizes: Sizes, period: int, stages: int | None = None) -> Template:
    """Insert the `N` and `U` actions that end each bucket's step, so that steps roll on without a pipeline flush.

    A bucket's next step starts while other buckets still drain: a task's micro-batches must wait only for its own
    optimizer step. `N` runs right after the bucket's last backward pass on a rank and sends the squared gradient norms
    to the previous rank along with the gradients. `U` runs right before the bucket's next forward pass: the totals
    arrive from the first rank along with the hidden states, and each rank clips by the whole norm and steps its
    optimizers. Neither makes a rank wait for anything that the passes around it would not wait for anyway.

    Args:
        template: Passes of one or several steps; a bucket's forward passes come after the backward passes of its
            previous step.
        period: Number of buckets in a step: buckets `e` and `e + period` hold the same tasks.
    """
    each = (len(template) if stages is None else stages) // len(template)
    return tuple(tuple(_ended(actions, rank, each, sizes, period)) for rank, actions in enumerate(template))


def most_in_flight(template: Template) -> int:
    """The largest number of chunks that any rank has in flight between forward and backward.

    Neighbours never lag further behind each other than this, so a tensor sent that many sends ago has been received.
    """
    most = 0
    for actions in template:
        launched = 0
        for action in actions:
            launched += {"F": 1, "B": -1}.get(action.kind, 0)
            most = max(most, launched)
    return most


def _interleaved(rank: int, ranks: int, virtual: int, chunk_ids: Sequence[ChunkId]) -> list[Action]:
    total = len(chunk_ids) * virtual

    def pass_of(i: int, kind: str) -> Action:
        group, within = divmod(i, ranks * virtual)
        turn = within // ranks
        chunk_id = chunk_ids[group * ranks + within % ranks]
        if kind == "F":
            return Action.of(turn * ranks + rank, "F", chunk_id)
        return Action.of((virtual - 1 - turn) * ranks + rank, "B", chunk_id)

    # With one group nothing is left to alternate with.
    ahead = total if len(chunk_ids) == ranks else min(total, 2 * (ranks - rank - 1) + (virtual - 1) * ranks)
    actions = [pass_of(i, "F") for i in range(ahead)]
    for i in range(total - ahead):
        actions += [pass_of(ahead + i, "F"), pass_of(i, "B")]
    return actions + [pass_of(i, "B") for i in range(total - ahead, total)]


def _alternate(
    stage: int, forward: Sequence[ChunkId], backward: Sequence[ChunkId], needed: Sequence[int]
) -> list[Action]:
    """Backward passes in order, each preceded by the forward passes that must run before it."""
    actions: list[Action] = []
    launched = 0
    for chunk_id, count in zip(backward, needed, strict=True):
        actions += _forwards(stage, forward[launched:count])
        launched = max(launched, min(count, len(forward)))
        actions.append(Action.of(stage, "B", chunk_id))
    return actions


def _forwards(stage: int, chunk_ids: Sequence[ChunkId]) -> list[Action]:
    return [Action.of(stage, "F", chunk_id) for chunk_id in chunk_ids]


def _backwards(stage: int, chunk_ids: Sequence[ChunkId]) -> list[Action]:
    return [Action.of(stage, "B", chunk_id) for chunk_id in chunk_ids]


def _ended(actions: Sequence[Action], rank: int, each: int, sizes: Sizes, period: int) -> Iterator[Action]:
    """Insert `N` as early and `U` as late as possible into a rank's actions, both in the order of the buckets."""
    left = [sum(chunks) * each for chunks in sizes]  # backward passes to come
    normed = updated = 0

    def norms() -> Iterator[Action]:
        """`N` of buckets that are done on this rank. A bucket without a micro-batch here ends with the previous one."""
        nonlocal normed
        while normed < len(sizes) and not left[normed]:
            if updated <= normed - period:
                return  # the gradients of its previous step are still in use
            yield Action(rank, "N", normed)
            normed += 1

    for action in actions:
        if action.kind == "F":
            yield from norms()
            while updated <= action.bucket - period:
                yield Action(rank, "U", updated)
                updated += 1
                yield from norms()
            yield action
        else:
            yield action
            left[action.bucket] -= 1
            yield from norms()
    yield from norms()
    while updated < len(sizes):
        yield Action(rank, "U", updated)
        updated += 1
        yield from norms()
