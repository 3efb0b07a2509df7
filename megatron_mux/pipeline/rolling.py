"""Steps that follow each other without a flush: a bucket's next step begins while other buckets drain.

Nothing but a task's own optimizer step orders its micro-batches. Buckets of later steps are counted on (`Unit`), and
two more kinds of actions end a bucket's step: `N`, right after its last backward pass on a stage, sends squared norms
along with the gradients to the stage before; `U`, right before the bucket's next forward pass, brings what the first
stage has summed up along with the hidden states, so that each stage clips by the whole norm and steps. No stage waits
for anything that the passes around it would not have waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_mux.pipeline.action import Action
from megatron_mux.pipeline.bucket import Sizes
from megatron_mux.pipeline.template import Template


def with_updates(template: Template, sizes: Sizes, period: int, stages: int | None = None) -> Template:
    """The same passes with the actions that end each bucket's step.

    Args:
        template: Passes of one or several steps in which a bucket's forward passes come after the backward passes of
            its step before.
        sizes: Of the buckets of all its steps.
        period: Buckets of a step: bucket `e` is the same tasks' as bucket `e + period`.
        stages: Number of stages; as many as ranks by default.
    """
    each = (len(template) if stages is None else stages) // len(template)
    return tuple(tuple(_ended(actions, rank, each, sizes, period)) for rank, actions in enumerate(template))


def _ended(actions: Sequence[Action], rank: int, each: int, sizes: Sizes, period: int) -> Iterator[Action]:
    """A rank's actions with `N` as early and `U` as late as can be, both in the order of the buckets.

    Args:
        each: Stages of the rank.
    """
    left = [sum(own) * each for own in sizes]  # backward passes to come
    normed = updated = 0

    def norms() -> Iterator[Action]:
        """Of the buckets that are done here; one without a micro-batch on this pipeline ends with the one before."""
        nonlocal normed
        while normed < len(sizes) and not left[normed]:
            if updated <= normed - period:
                return  # its tasks' gradients are still those of the step before
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
