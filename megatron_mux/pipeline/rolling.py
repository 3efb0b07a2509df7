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
    count = len(template) if stages is None else stages
    return tuple(
        tuple(_ended(actions, range(rank, count, len(template)), sizes, period))
        for rank, actions in enumerate(template)
    )


def _ended(actions: Sequence[Action], stages: Sequence[int], sizes: Sizes, period: int) -> Iterator[Action]:
    """A rank's actions with `N` as early and `U` as late as can be, both in the order of the buckets."""
    left = {stage: [sum(own) for own in sizes] for stage in stages}  # backward passes to come
    normed = dict.fromkeys(stages, 0)
    updated = dict.fromkeys(stages, 0)

    def norms(stage: int) -> Iterator[Action]:
        """Of the buckets that are done here; one without a micro-batch on this pipeline ends with the one before."""
        while (entry := normed[stage]) < len(sizes) and not left[stage][entry]:
            if updated[stage] <= entry - period:
                return  # its tasks' gradients are still those of the step before
            yield Action(stage, "N", entry)
            normed[stage] += 1

    for action in actions:
        stage = action.stage
        if action.kind == "F":
            yield from norms(stage)
            while updated[stage] <= action.bucket - period:
                yield Action(stage, "U", updated[stage])
                updated[stage] += 1
                yield from norms(stage)
            yield action
        else:
            yield action
            left[stage][action.bucket] -= 1
            yield from norms(stage)
    for stage in reversed(stages):
        yield from norms(stage)
    for entry in range(len(sizes)):
        for stage in stages:
            if updated[stage] <= entry:
                yield Action(stage, "U", entry)
                updated[stage] += 1
        for stage in reversed(stages):
            yield from norms(stage)
