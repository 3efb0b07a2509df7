"""Divides layers among stages by the time they take instead of by their number.

The first stage also embeds tokens, and the last one computes the loss of the labelled ones, which may take as long as
several layers; layers below the lowest adapter have no backward pass. A pipeline is as fast as its slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_mux.backbone.split import Split, even_split
from megatron_mux.fusion.mesh import Mesh
from megatron_mux.fusion.planner.planning_context import PlanningContext


def balanced_split(context: PlanningContext, virtual: int = 1) -> Split:
    """The split whose slowest stage is the fastest; of several such, the most even one.

    The embedding counts with the first layer, the loss head with the last.

    Args:
        context: The split of its mesh is ignored; without tasks, stages get equal numbers of layers.
    """
    mesh, tasks, layers = context.mesh, context.tasks, context.info.shape.layers
    stages = mesh.pipeline * virtual
    if stages == 1 or not tasks:
        return even_split(layers, stages)
    one_layer_each = Mesh(mesh.tensor, 1, mesh.data, (1,) * layers)
    # As many parts as fill the pipeline: small ones have more overhead.
    parts = max(2 * mesh.pipeline, *(load.accumulation for load in tasks.values()))
    cost = (
        replace(context, mesh=one_layer_each, memory_limit=None)
        .costs()
        .hybrid(tuple(range(len(tasks))), parts)
    )
    seconds = [forward + backward for forward, backward in zip(cost.forward, cost.backward, strict=True)]
    return least_maximum(seconds, stages)


def least_maximum(weights: Sequence[float], parts: int) -> Split:
    """Cut a row of weights into parts of at least one each, so that the heaviest is as light as can be.

    Of all such cuts, the one whose parts' squares sum up to the least.

    Args:
        weights: At least as many as parts.
        parts: At least one.
    """
    totals = list(accumulate(weights, initial=0.0))
    heaviest = _best_cut(totals, parts, float("inf"), by_maximum=True)[0]
    return _best_cut(totals, parts, heaviest * (1 + 1e-12), by_maximum=False)[1]


def _best_cut(totals: Sequence[float], parts: int, limit: float, by_maximum: bool) -> tuple[float, Split]:
    """Over cuts without a part above `limit`: the least maximum, or sum of squares, of the parts."""
    count = len(totals) - 1
    known: dict[int, tuple[float, Split]] = {0: (0.0, ())}
    for part in range(parts):
        after: dict[int, tuple[float, Split]] = {}
        for stop in range(part + 1, count - (parts - part - 1) + 1):
            best: tuple[float, Split] | None = None
            for start, (value, cut) in known.items():
                weight = totals[stop] - totals[start]
                if start >= stop or weight > limit:
                    continue
                cost = max(value, weight) if by_maximum else value + weight * weight
                if best is None or cost < best[0]:
                    best = cost, (*cut, stop - start)
            if best is not None:
                after[stop] = best
        known = after
    return known[count]
