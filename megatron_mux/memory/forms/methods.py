"""Ways to divide a training step among GPUs, and what is trained how: what a prediction is made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.kept import Attention, Recompute
from megatron_mux.memory.forms.sites import TaskAdapters
from megatron_mux.memory.optimizers import DEFAULT, OPTIMIZERS, Optimizer, Shapes, Zero

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
_RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Portion:
    """What a task has of a micro-batch.

    Attributes:
        share: Of its rows.
        length: Tokens of each of its sequences.
    """

    share: float
    length: int


@dataclass(frozen=True)
class Recipe:
    """What is trained and how: what changes results, and so is the user's to say.

    Attributes:
        length: Tokens of the longest sequence.
        precision: Of products: of weights and hidden states too, but for autocast.
        optimizer: Of full fine-tuning, a name of `OPTIMIZERS`; tasks have their own.
        master: Whether half precision has fp32 weights, gradients and moments: beside half-precision weights, as
            Megatron's mixed precision has it, or alone, for autocast, where `transformers` runs it; else all of these
            are in the precision.
        attention: Whether scores are kept (`eager`).
        adapters: The tasks of one hybrid task on a frozen backbone; empty: every parameter is trained.
        mix: A portion for each of them; empty: all have the same, of sequences of `length` tokens.
    """

    length: int
    precision: Precision = "bf16"
    optimizer: str = DEFAULT
    master: bool = True
    attention: Attention = "flash"
    adapters: tuple[TaskAdapters, ...] = ()
    mix: tuple[Portion, ...] = ()

    @property
    def portions(self) -> tuple[Portion, ...]:
        """A portion for each task."""
        count = len(self.adapters)
        return self.mix or (Portion(1 / count, self.length),) * count

    @property
    def mean_length(self) -> float:
        """Tokens of the sequence that a row is of, in the mean of rows."""
        return sum(part.share * part.length for part in self.mix) if self.mix else self.length

    @property
    def frozen(self) -> bool:
        """Whether only adapters are trained."""
        return bool(self.adapters)

    @property
    def size(self) -> int:
        """Bytes of a weight as products take it."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_size(self) -> int:
        """Bytes of a weight between uses."""
        return 4 if self.autocast else self.size

    @property
    def by_trainer(self) -> bool:
        """Whether `transformers.Trainer` runs it: all is trained, by an optimizer that Megatron-LM does not have."""
        return not self.frozen and self.keeps.megatron is None

    @property
    def autocast(self) -> bool:
        """Whether weights are in fp32, and products take half-precision copies of them: `bf16=True` of `Trainer`."""
        return self.by_trainer and self.master and self.size < 4

    @property
    def has_master(self) -> bool:
        """Whether there are fp32 copies of weights."""
        return self.master and self.size < 4 and not self.frozen and not self.by_trainer

    @property
    def gradient_size(self) -> int:
        """Bytes of a gradient's value."""
        return 4 if self.frozen or self.has_master else self.weight_size

    @property
    def keeps(self) -> Optimizer:
        """The optimizer of full fine-tuning."""
        return OPTIMIZERS[self.optimizer]

    @property
    def state_size(self) -> float:
        """Bytes that the optimizer has for a value of a large matrix, a master copy included."""
        return self._master_size + self.keeps.state_size(self.gradient_size)

    def states(self, values: float, shapes: Shapes) -> float:
        """Bytes that the optimizer has for some weights, master copies included.

        Args:
            values: Of the weights.
            shapes: Of their tensors.
        """
        return self._master_size * values + self.keeps.states(values, shapes, self.gradient_size)

    def step(self, values: float, shapes: Shapes) -> float:
        """Bytes that an optimizer's step makes anew; Megatron's mixed precision has optimizers that make nothing.

        Args:
            values: Of the weights.
            shapes: Of their tensors.
        """
        if self.has_master:
            return 0.0
        return self.keeps.step(values, shapes, self.gradient_size)

    @property
    def _master_size(self) -> int:
        return 4 if self.has_master else 0


@dataclass(frozen=True)
class Method:
    """A way to divide a step: what leaves results alone.

    Attributes:
        data: Data-parallel ranks.
        tensor: Ranks that share each layer.
        pipeline: Stages.
        expert: Data-parallel ranks that share a layer's experts.
        sequence_parallel: Whether tensor ranks divide the rows outside the products.
        zero: What data-parallel ranks divide: nothing, the optimizer's states (1), gradients too (2), weights too (3:
            FSDP). Of a frozen backbone there are weights alone to divide.
        recompute: What is computed again in the backward pass.
        offload: Whether host memory keeps what is not in use: a frozen backbone's weights; else the optimizer's
            states, which are stepped there.
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
        """How many GPUs it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Of a step on each pipeline; usually one, or four for each stage, so that its bubble is below a fifth."""
        return self.parts or (4 * self.pipeline if self.pipeline > 1 else 1)

    @property
    def name(self) -> str:
        """Its degrees, such as `2DP+2TP`."""
        degrees = ((self.data, "DP"), (self.tensor, "TP"), (self.pipeline, "PP"), (self.expert, "EP"))
        return "+".join(f"{size}{kind}" for size, kind in degrees if size > 1) or "1DP"

    @property
    def details(self) -> str:
        """The rest, in words; empty for the plainest."""
        words = [
            f"ZeRO-{self.zero}" if self.zero else "",
            "sequence parallel" if self.sequence_parallel else "",
            f"{self.recompute} recomputation" if self.recompute != "none" else "",
            "offload" if self.offload else "",
        ]
        return ", ".join(filter(None, words))


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
