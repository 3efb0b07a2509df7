"""What adapters keep of their own from a forward pass to its backward pass, beside what the backbone's layers keep."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mux.base_ops import BaseOpName
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.kept import Pass, Saved, Where
from megatron_mux.memory.forms.sites import OPS, Site, TaskAdapters

_LOW_RANK = ("LORA", "LORA_DROPOUT")
_NEED_INPUT = (*_LOW_RANK, "DIFF_PRUNING")
_COLUMN = ("linear_qkv", "linear_fc1")

SUMMED_AT_ONCE = 1 << 22
"""Elements of gradients that one collective sums over ranks, unless a single gradient has more."""

WEIGHTS_AT_ONCE = 1 << 26
"""Bytes of a unit, at the most, that one message brings: `backbone.residence.PIECE`."""


def inputs(tasks: Sequence[TaskAdapters], layer: int) -> frozenset[str]:
    """BaseOps of a layer whose input some task's adapter needs: one tensor for all of them."""
    return frozenset(
        str(site.op)
        for task in tasks
        for site in _at(task, layer)
        if site.kind in _NEED_INPUT or site.scales_input
    )


def whole(tasks: Sequence[TaskAdapters], layer: int, architecture: Architecture, run: Pass) -> list[Saved]:
    """What all rows keep since some task's adapter needs its own: a part of a tensor keeps the whole.

    An adapter that acts on a BaseOp's output keeps that. Where one acts on an input and another needs it afterwards,
    there are two.
    """
    saved: list[Saved] = []
    sites = [site for task in tasks for site in _at(task, layer)]
    for op in OPS:
        own = [site for site in sites if site.op == op]
        into, out = _widths(architecture, op)
        column = op in _COLUMN
        if any(site.kind == "BOTTLENECK" or (site.kind == "IA3" and not site.scales_input) for site in own):
            saved.append(Saved("output before adapters", "columns" if column else "rows", out, run.size))
        if not column and any(s.scales_input for s in own) and any(s.kind in _NEED_INPUT for s in own):
            saved.append(Saved("input after adapters", "columns", into, run.size))
    return saved


def message(architecture: Architecture, tensor: int, size: int) -> float:
    """Bytes of a row of the largest message between tensor ranks: `engine.messages.largest_message`."""
    if tensor == 1:
        return 0.0
    whole = architecture.queries + 2 * architecture.keys
    return size * max(architecture.hidden, whole if architecture.kv_heads < tensor else 0)


def rows(task: TaskAdapters, layer: int, architecture: Architecture, run: Pass) -> list[Saved]:
    """What a row of a task keeps for its adapter in a layer, besides what `whole` has."""
    saved: list[Saved] = []
    for site in _at(task, layer):
        into, _ = _widths(architecture, site.op)
        inside: Where = "all" if site.op in _COLUMN else "columns"
        if site.kind in _LOW_RANK:
            saved.append(Saved("low-rank product", "all", site.size, run.size))
        if site.kind == "LORA_DROPOUT":
            saved.append(Saved("dropout masks", inside, into * site.modules, 1))
        if site.kind == "BOTTLENECK":
            saved.append(Saved("bottleneck", "rows", 2 * site.size, run.size))
        if site.kind == "DIFF_PRUNING" or (site.scales_input and site.op in _COLUMN):
            saved.append(Saved("product of its own", "columns", site.width, run.size))
        if site.kind == "PREFIX_TUNING":
            # Every sequence has keys and values of its own beside the prefix's copy.
            share = site.size / run.length
            saved.append(Saved("prefix", "columns", 2 * architecture.keys * share, run.size))
    return saved


def factors(task: TaskAdapters, layer: int, architecture: Architecture, run: Pass, tensor: int) -> float:
    """Bytes of an adapter's matrices of a layer as products take them, in the backbone's precision.

    For each micro-batch anew. An upper bound: a low-rank factor that is alone and has that precision is not copied.
    """
    found = 0.0
    for site in _at(task, layer):
        into, out = _widths(architecture, site.op)
        if site.kind in _LOW_RANK:
            column = site.op in _COLUMN
            found += site.size * (into + out / tensor if column else into / tensor + out) * run.size
        if site.kind == "BOTTLENECK" and run.size < 4:
            found += 2 * site.size * out * run.size
    return found


_OF_A_MASK = 5
"""Values of 4 bytes for each element of a difference: its mask, its slope, random numbers and what they are made of."""


def scratch(
    tasks: Sequence[TaskAdapters], layers: Sequence[int], architecture: Architecture, tensor: int
) -> float:
    """Bytes that come and go with a pass or a step of an adapter as large as a weight: one of diff pruning.

    Its modules are computed one after the other; of several in a BaseOp the mean counts.
    """
    largest = 0.0
    for site in (site for task in tasks for layer in layers for site in _at(task, layer)):
        if site.kind == "DIFF_PRUNING":
            into, out = _widths(architecture, site.op)
            largest = max(largest, into * (site.width or out) / site.modules / tensor)
    return _OF_A_MASK * 4 * largest


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
