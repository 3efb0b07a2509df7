"""Chooses whether layers are recomputed where no flag says: the rule of a run and of `megatron-mux plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_mux.errors import UserError
from megatron_mux.fusion.planner import Planner
from megatron_mux.fusion.planning_context import PlanningContext


def choose_recompute(
    context: PlanningContext,
    device: str,
    asked: str | None,
    divide: Callable[[PlanningContext], PlanningContext],
    say: Callable[[str], None],
) -> PlanningContext:
    """Divide the layers; on a GPU, recompute them if some task does not fit into memory otherwise.

    Attention alone is never chosen: it keeps no scores, so at most its output is saved.

    Args:
        context: With the recomputation that the flag asks for.
        device: `cpu`, `cuda` or the name of a GPU.
        asked: The value of `--recompute-granularity`; None: it was not given, and more may be chosen.
        divide: Divides the context's layers into stages.
        say: Told of the choice.

    Returns:
        The divided context.
    """
    found = divide(context)
    if asked is not None or device == "cpu":
        return found
    try:
        Planner(found).check(found.tasks)
    except UserError:
        say(
            "some task does not fit into memory otherwise: layers are recomputed (--recompute-granularity full)"
        )
        return divide(replace(context, recompute="full"))
    return found
