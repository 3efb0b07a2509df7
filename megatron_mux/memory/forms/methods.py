"""All sensible ways to divide a step among some GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import Method, Recompute
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.optimizers import Zero

_RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "full")


def methods(gpus: int, architecture: Architecture, recipe: Recipe) -> list[Method]:
    """All sensible methods for so many GPUs, the plainest first.

    Left out is what cannot help: division of gradients in a pipeline that sums them over micro-batches, recomputation
    of attention that keeps no scores, division of a frozen backbone's optimizer; of full fine-tuning, an optimizer in
    host memory that is not AdamW, or whose states every rank keeps: ranks divide the work there. And what nothing runs:
    ZeRO with an optimizer that cannot be divided so; layers divided, or attention alone recomputed, with one that
    Megatron-LM does not have.
    """
    alone = not recipe.frozen and recipe.keeps.megatron is None
    found = [
        Method(data, tensor, pipeline, expert, sequence_parallel, zero, recompute, offload)
        for data, tensor, pipeline in _degrees(gpus)
        if not problem(architecture, tensor, pipeline) and (data == gpus or not alone)
        for expert in ([1] if alone else _experts(architecture, data))
        for sequence_parallel in ((False, True) if tensor > 1 else (False,))
        for zero in _zeros(data, pipeline, recipe)
        for recompute in _RECOMPUTED
        if recompute != "selective" or (not alone and _keeps_more_than_inputs(architecture, recipe))
        for offload in _offloads(data, zero, recipe)
    ]
    return sorted(found, key=_plainness)


def impossible(gpus: int, architecture: Architecture) -> dict[str, str]:
    """Methods that the model's sizes exclude, and why."""
    return {
        Method(data, tensor, pipeline).name: why
        for data, tensor, pipeline in _degrees(gpus)
        if (why := problem(architecture, tensor, pipeline)) is not None
    }


def problem(architecture: Architecture, tensor: int, pipeline: int) -> str | None:
    """What keeps a model from being divided so; None if nothing does."""
    layers = len(architecture.layers)
    if layers < pipeline:
        return f"{layers} layers cannot fill {pipeline} pipeline stages"
    return architecture.tensor_problem(tensor)


def _degrees(gpus: int) -> Iterator[tuple[int, int, int]]:
    """Data, tensor and pipeline degrees."""
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for tensor in divisors:
        for pipeline in divisors:
            if gpus % (tensor * pipeline) == 0:
                yield gpus // (tensor * pipeline), tensor, pipeline


def _experts(architecture: Architecture, data: int) -> list[int]:
    """Degrees of expert parallelism among so many data-parallel ranks."""
    most = min(data, architecture.experts)
    return [size for size in range(1, most + 1) if data % size == 0 and architecture.experts % size == 0]


def _zeros(data: int, pipeline: int, recipe: Recipe) -> tuple[Zero, ...]:
    if data == 1:
        return (0,)
    if recipe.frozen:
        return (0, 3)
    return tuple(zero for zero in recipe.keeps.zeros if pipeline == 1 or zero != 2)


def _offloads(data: int, zero: int, recipe: Recipe) -> tuple[bool, ...]:
    helps = recipe.frozen or (recipe.keeps.megatron == "adam" and (zero > 0 or data == 1))
    return (False, True) if helps else (False,)


def _keeps_more_than_inputs(architecture: Architecture, recipe: Recipe) -> bool:
    """Whether computing attention again saves anything worth it.

    Our engine keeps values as they lie, in the product's output: with queries and keys rotated beside it, that is more
    than attention's output.
    """
    if recipe.frozen:
        return not architecture.rotary
    grouped = architecture.kv_heads < architecture.heads
    return recipe.attention == "eager" or (recipe.size > 2 and grouped)


def _plainness(method: Method) -> tuple[int, ...]:
    return (
        method.offload,
        _RECOMPUTED.index(method.recompute),
        method.zero,
        method.tensor * method.pipeline * method.expert,
        method.pipeline,
        method.sequence_parallel,
    )
