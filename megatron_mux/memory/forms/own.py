"""What adapters keep of their own from a forward pass to its backward pass, beside what the backbone's layers keep."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mux.base_ops import COLUMN_PARALLEL, BaseOpName
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.kept import Pass, Saved, Where
from megatron_mux.memory.forms.sites import OPS, Site, TaskAdapters


def inputs(tasks: Sequence[TaskAdapters], layer: int) -> frozenset[str]:
    """BaseOps of a layer whose input some task's adapter needs: one tensor for all of them."""
    return frozenset(str(site.op) for task in tasks for site in _at(task, layer) if site.kept.input)


def whole(tasks: Sequence[TaskAdapters], layer: int, architecture: Architecture, run: Pass) -> list[Saved]:
    """What all rows keep since some task's adapter needs its own: a part of a tensor keeps the whole.

    An adapter that acts on a BaseOp's output keeps that. Where one acts on an input and another needs it afterwards,
    there are two.
    """
    saved: list[Saved] = []
    sites = [site for task in tasks for site in _at(task, layer)]
    for op in OPS:
        own = [site.kept for site in sites if site.op == op]
        into, out = _widths(architecture, op)
        if any(kept.output for kept in own):
            where: Where = "columns" if op in COLUMN_PARALLEL else "rows"
            saved.append(Saved("output before adapters", where, out, run.size))
        if any(k.replaces_input for k in own) and any(k.input and not k.replaces_input for k in own):
            saved.append(Saved("input after adapters", "columns", into, run.size))
    return saved


def rows(task: TaskAdapters, layer: int, architecture: Architecture, run: Pass) -> list[Saved]:
    """What a row of a task keeps for its adapter in a layer, besides what `whole` has."""
    sites = _at(task, layer)
    saved = [
        Saved(row.what, row.where, row.width, row.size or run.size)
        for site in sites
        for row in site.kept.rows
    ]
    if task.virtual_tokens:
        # Every sequence has keys and values of its own beside the prefix's copy.
        share = task.virtual_tokens / run.length
        saved.append(Saved("prefix", "columns", 2 * architecture.keys * share, run.size))
    return saved


def factors(task: TaskAdapters, layer: int, run: Pass, tensor: int) -> float:
    """Bytes of an adapter's matrices of a layer as products take them, in the backbone's precision.

    For each micro-batch anew. An upper bound: a low-rank factor that is alone and has that precision is not copied.
    """
    made = [site.kept for site in _at(task, layer) if run.size < 4 or not site.kept.copied_if_rounded]
    return sum((kept.divided / tensor + kept.whole) * run.size for kept in made)


def scratch(tasks: Sequence[TaskAdapters], layers: Sequence[int], tensor: int) -> float:
    """Bytes that come and go with a pass or a step of an adapter as large as a weight: one at a time."""
    sites = (site for task in tasks for layer in layers for site in _at(task, layer))
    return 4 * max((site.kept.scratch for site in sites), default=0.0) / tensor


def _at(task: TaskAdapters, layer: int) -> tuple[Site, ...]:
    return task.by_layer.get(layer, ())


def _widths(architecture: Architecture, op: BaseOpName) -> tuple[int, int]:
    """Input and output width of a BaseOp."""
    a = architecture
    return {
        "linear_qkv": (a.hidden, a.queries + 2 * a.keys),
        "linear_proj": (a.queries, a.hidden),
        "linear_fc1": (a.hidden, a.inner),
        "linear_fc2": (a.ffn, a.hidden),
    }[op]
