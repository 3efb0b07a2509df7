"""What adapters keep of their own from a forward pass to its backward pass, beside what the backbone's layers keep."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mux.layout import BaseOpName
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.kept import Pass, Saved, Where
from megatron_mux.memory.forms.sites import Site, TaskAdapters

_LOW_RANK = ("LORA", "LORA_DROPOUT")
_NEED_INPUT = (*_LOW_RANK, "DIFF_PRUNING")


def inputs(tasks: Sequence[TaskAdapters], layer: int) -> frozenset[str]:
    """BaseOps of a layer whose input some task's adapter needs: one tensor for all of them."""
    return frozenset(str(site.op) for task in tasks for site in _at(task, layer) if site.kind in _NEED_INPUT)


def rows(task: TaskAdapters, layer: int, architecture: Architecture, run: Pass) -> list[Saved]:
    """What a row of a task keeps for its adapter in a layer."""
    saved: list[Saved] = []
    for site in _at(task, layer):
        into, out = _widths(architecture, site.op)
        column = site.op in ("linear_qkv", "linear_fc1")
        inside: Where = "all" if column else "columns"
        if site.kind in _LOW_RANK:
            saved.append(Saved("low-rank product", "all", site.size, run.size))
        if site.kind == "LORA_DROPOUT":
            saved.append(Saved("dropout mask", inside, into, 1))
        if site.kind == "BOTTLENECK":
            saved.append(Saved("bottleneck", "rows", architecture.hidden + 2 * site.size, run.size))
        if site.kind == "IA3":
            saved.append(Saved("scaled output", "columns" if column else "rows", out, run.size))
        if site.kind == "PREFIX_TUNING":
            share = (
                site.size / run.length
            )  # every sequence has keys and values of its own beside the prefix's copy
            saved.append(Saved("prefix", "columns", 2 * architecture.keys * share, run.size))
    return saved


def factors(task: TaskAdapters, layer: int, architecture: Architecture, run: Pass, tensor: int) -> float:
    """Bytes of low-rank factors of a layer as a product takes them, stacked and in the backbone's precision.

    For each micro-batch anew. An upper bound: a factor that is alone and has that precision is not copied.
    """
    found = 0.0
    for site in _at(task, layer):
        if site.kind in _LOW_RANK:
            into, out = _widths(architecture, site.op)
            column = site.op in ("linear_qkv", "linear_fc1")
            found += site.size * (into + out / tensor if column else into / tensor + out) * run.size
    return found


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
