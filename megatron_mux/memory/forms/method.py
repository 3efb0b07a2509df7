"""Ways to divide a training step among GPUs without changing its results, and the list of useful ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.optimizers import Zero

Recompute = Literal["none", "selective", "full"]
_RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class ParallelConfig:
    """A way to divide a step, without changing its results.

    Attributes:
        data: Data-parallel ranks.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Data-parallel ranks that share a layer's experts.
        sequence_parallel: Whether tensor ranks divide the rows outside the products.
        zero: What data-parallel ranks shard: nothing, the optimizer's states (1), gradients too (2), weights too (3:
            FSDP). Of a frozen backbone only weights can be sharded.
        recompute: What is recomputed in the backward pass.
        offload: Whether host memory keeps a frozen backbone's weights between uses; in full fine-tuning, the
            optimizer's states, whose step is computed there.
        parts: Micro-batches of a step on each pipeline; None for the usual number.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    zero: Zero = 0
    recompute: Recompute = "none"
    offload: bool = False
    parts: int | None = None

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each pipeline; by default one, or four per stage: the bubble is below a fifth."""
        return self.parts or (4 * self.pipeline if self.pipeline > 1 else 1)

    @property
    def residence(self) -> Literal["resident", "sharded", "offloaded", "sharded-offloaded"]:
        """Where a frozen backbone's weights are between uses: the value of `--mux-backbone-weights`."""
        if self.zero == 3:
            return "sharded-offloaded" if self.offload else "sharded"
        return "offloaded" if self.offload else "resident"

    @property
    def communicators(self) -> int:
        """NCCL communicators of a rank: one for each kind of parallelism, one for all ranks, one to each neighbour."""
        kinds = sum(size > 1 for size in (self.data, self.tensor, self.expert))
        return kinds + 2 * (self.pipeline > 1) + (self.gpus > 1)

    @property
    def name(self) -> str:
        """Its degrees, such as `2DP+2TP`."""
        degrees = ((self.data, "DP"), (self.tensor, "TP"), (self.pipeline, "PP"), (self.expert, "EP"))
        return "+".join(f"{size}{kind}" for size, kind in degrees if size > 1) or "1DP"

    @property
    def details(self) -> str:
        """Everything but its degrees, in words; empty for the plainest method."""
        words = [
            f"ZeRO-{self.zero}" if self.zero else "",
            "sequence parallel" if self.sequence_parallel else "",
            f"{self.recompute} recomputation" if self.recompute != "none" else "",
            "offload" if self.offload else "",
        ]
        return ", ".join(filter(None, words))

    @property
    def title(self) -> str:
        """Its name and, in brackets, its details."""
        return f"{self.name} ({self.details})" if self.details else self.name


def methods(gpus: int, architecture: Architecture, recipe: Recipe) -> list[ParallelConfig]:
    """All useful methods for a number of GPUs, the plainest first.

    Left out are those that cannot help: sharded gradients in a pipeline, which sums them over micro-batches;
    recomputation of attention that keeps no scores; sharded optimizer states of a frozen backbone; in full fine-tuning,
    an offloaded optimizer other than AdamW, or one whose states every rank keeps. And those that no program runs: ZeRO
    with an optimizer whose states cannot be sharded; tensor or pipeline parallelism, or selective recomputation, with
    an optimizer that Megatron-LM does not have; of a frozen backbone with experts, what the engine refuses.
    """
    alone = not recipe.frozen and recipe.keeps.megatron is None
    every = [
        ParallelConfig(data, tensor, pipeline, expert, sequence_parallel, zero, recompute, offload)
        for data, tensor, pipeline in _degrees(gpus)
        if not _problem(architecture, tensor, pipeline) and (data == gpus or not alone)
        for expert in ([1] if alone else _experts(architecture, data))
        for sequence_parallel in ((False, True) if tensor > 1 else (False,))
        for zero in _zeros(data, pipeline, recipe)
        for recompute in _RECOMPUTED
        if recompute != "selective" or (not alone and _keeps_more_than_inputs(architecture, recipe))
        for offload in _offloads(data, zero, recipe)
    ]
    refused = architecture.moe is not None and recipe.frozen
    return sorted((one for one in every if not (refused and _refused_with_experts(one))), key=_plainness)


def _refused_with_experts(method: ParallelConfig) -> bool:
    """Whether the engine refuses it for a backbone with experts: see `backbone.model`."""
    whole_rows = method.tensor > 1 and not method.sequence_parallel
    return whole_rows or (method.zero == 3 and method.expert > 1)


def impossible(gpus: int, architecture: Architecture) -> dict[str, str]:
    """Methods that the model's sizes exclude, and why."""
    return {
        ParallelConfig(data, tensor, pipeline).name: why
        for data, tensor, pipeline in _degrees(gpus)
        if (why := _problem(architecture, tensor, pipeline)) is not None
    }


def _problem(architecture: Architecture, tensor: int, pipeline: int) -> str | None:
    """Why a model cannot be divided so; None if it can."""
    a, layers = architecture, len(architecture.layers)
    if layers < pipeline:
        return f"{layers} layers cannot fill {pipeline} pipeline stages"
    if a.heads % tensor:
        return f"{a.heads} attention heads cannot be divided among {tensor} GPUs"
    if a.kv_heads % tensor and tensor % a.kv_heads:
        return f"{a.kv_heads} key-value heads cannot be shared by {tensor} GPUs"
    of_experts = () if a.moe is None else (a.moe.shared_ffn, a.moe.ffn)
    for width in filter(None, (a.ffn, *of_experts)):
        if width % tensor:
            return f"an MLP of width {width} cannot be divided among {tensor} GPUs"
    return None


def _degrees(gpus: int) -> Iterator[tuple[int, int, int]]:
    """Data, tensor and pipeline degrees."""
    divisors = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for tensor in divisors:
        for pipeline in divisors:
            if gpus % (tensor * pipeline) == 0:
                yield gpus // (tensor * pipeline), tensor, pipeline


def _experts(architecture: Architecture, data: int) -> list[int]:
    """Degrees of expert parallelism among `data` data-parallel ranks."""
    if architecture.placement is not None:
        size = architecture.placement.size
        return [] if data % size else [size]
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
    """Whether recomputing attention alone saves memory.

    The engine keeps values as part of the whole output of linear_qkv: with rotated queries and keys beside it, that is
    more than attention's output.
    """
    if recipe.frozen:
        return not architecture.rotary
    grouped = architecture.kv_heads < architecture.heads
    return recipe.attention == "eager" or (recipe.size > 2 and grouped)


def _plainness(method: ParallelConfig) -> tuple[int, ...]:
    return (
        method.offload,
        _RECOMPUTED.index(method.recompute),
        method.zero,
        method.tensor * method.pipeline * method.expert,
        method.pipeline,
        method.sequence_parallel,
    )
