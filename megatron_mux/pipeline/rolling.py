"""Rolling steps: a bucket's next step starts while other buckets still drain, without a pipeline flush.

A task's micro-batches must wait only for its own optimizer step. Two kinds of actions end a bucket's step. `N` runs
right after the bucket's last backward pass on a rank and sends the squared gradient norms to the previous rank along
with the gradients. `U` runs right before the bucket's next forward pass: the totals arrive from the first rank along
with the hidden states, and each rank clips by the whole norm and steps its optimizers. Neither makes a rank wait for
anything that the passes around it would not wait for anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.bucket import Sizes
from megatron_mux.pipeline.template import Template


def with_updates(template: Template, sizes: Sizes, period: int, stages: int | None = None) -> Template:
    """Insert the `N` and `U` actions that end each bucket's step.

    Args:
        template: Passes of one or several steps; a bucket's forward passes come after the backward passes of its
            previous step.
        sizes: Chunks of the micro-batches of all buckets of all steps.
        period: Number of buckets in a step: buckets `e` and `e + period` hold the same tasks.
        stages: Number of stages; by default one per rank.
    """
    each = (len(template) if stages is None else stages) // len(template)
    return tuple(tuple(_ended(actions, rank, each, sizes, period)) for rank, actions in enumerate(template))


def _ended(actions: Sequence[Action], rank: int, each: int, sizes: Sizes, period: int) -> Iterator[Action]:
    """Insert `N` as early and `U` as late as possible into a rank's actions, both in the order of the buckets.

    Args:
        each: Number of stages on the rank.
    """
    left = [sum(own) * each for own in sizes]  # backward passes to come
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
