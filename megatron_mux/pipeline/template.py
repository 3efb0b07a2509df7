"""Templates: the order of actions on one stage."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mux.pipeline.action import Action


def one_f_one_b(stage: int, stages: int, micro_batches: Sequence[int]) -> list[Action]:
    """1F1B over the micro-batches of all buckets in a row, with no flush between buckets.

    A stage launches as many forwards as there are stages behind it, then alternates, then drains.

    Args:
        stage: This stage.
        stages: Number of stages.
        micro_batches: Number of micro-batches of each bucket.

    Returns:
        The stage's actions in order.
    """
    everything = [(b, m) for b, count in enumerate(micro_batches) for m in range(count)]
    eager = min(stages - stage - 1, len(everything))
    order = [Action(stage, "F", b, m) for b, m in everything[:eager]]
    for i, (b, m) in enumerate(everything[eager:]):
        order.append(Action(stage, "F", b, m))
        order.append(Action(stage, "B", *everything[i]))
    order += [Action(stage, "B", b, m) for b, m in everything[len(everything) - eager :]]
    return order


def forward_only(stage: int, micro_batches: int) -> list[Action]:
    """Forward passes alone (evaluation).

    Args:
        stage: This stage.
        micro_batches: How many.

    Returns:
        The stage's actions in order.
    """
    return [Action(stage, "F", 0, m) for m in range(micro_batches)]
