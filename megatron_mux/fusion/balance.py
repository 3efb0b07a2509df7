"""Which layers each stage gets: by what they take, not by their number.

The first stage embeds tokens too, and the last computes the loss of the labelled ones, which may cost as much as
several layers; layers below the lowest adapter have no backward pass. A pipeline is as fast as its slowest stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_mux.backbone.split import Split, even_split
from megatron_mux.fusion.desk import Mesh, Premises
from megatron_mux.fusion.load import TaskLoad


def balanced_split(premises: Premises, loads: Sequence[TaskLoad], virtual: int = 1) -> Split:
    """The split whose slowest stage is the fastest; of several such, the most even.

    Args:
        premises: What costs come from; the split of its mesh is left alone.
        loads: The tasks; without any, layers are divided by their number.
        virtual: Stages of each rank.
    """
    layers, stages = premises.info.shape.layers, premises.mesh.pipeline * virtual
    if stages == 1 or not loads:
        return even_split(layers, stages)
    return least_maximum(layer_seconds(premises, loads), stages)


def layer_seconds(premises: Premises, loads: Sequence[TaskLoad]) -> list[float]:
    """`[L]` seconds of a step of these tasks in each layer, forward and backward; with the embedding in the first, the
    loss head in the last.
    """
    alone = tuple(range(premises.info.shape.layers))
    one_each = replace(premises, mesh=Mesh(premises.mesh.tensor, 1, premises.mesh.data, (1,) * len(alone)))
    costs = one_each.costs(loads)
    # As many parts as fill the pipeline: small ones have more overhead.
    parts = max(2 * premises.mesh.pipeline, *(load.accumulation for load in loads))
    cost = costs.hybrid(tuple(range(len(loads))), parts)
    return [forward + backward for forward, backward in zip(cost.forward, cost.backward, strict=True)]


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
                found = max(value, weight) if by_maximum else value + weight * weight
                if best is None or found < best[0]:
                    best = found, (*cut, stop - start)
            if best is not None:
                after[stop] = best
        known = after
    return known[count]
