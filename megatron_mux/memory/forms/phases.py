"""The memory of a training step: bytes by part at the phases at which a rank's memory may be at its highest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import Method, Recompute
from megatron_mux.memory.forms.process_overhead import ProcessOverhead
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.pipeline.template import most_in_flight, one_f_one_b, plain

PARTS = (
    "parameters",
    "adapters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "workspace",
    "communication",
    "fragmentation",
    "context",
)
"""What memory is for. `activations`: what passes keep, autocast's copies of weights among it; `communication`: weights
gathered or copied for use, gradients copied to be summed; `fragmentation`: held by the allocator, used by nothing;
`context`: beside the allocator's."""

TRANSIENT = frozenset({"activations", "logits", "workspace", "communication"})
"""Parts that come and go, and so leave fragments."""

FRAGMENTATION: Mapping[Recompute, float] = {"none": 0.07, "selective": 0.07, "full": 0.26}
"""Fragmentation as a share of what comes and goes: medians of replays of dry-run and traced steps, in the least memory
in which they run (2 to 29% where all is kept, 4 to 88% where layers are computed again, most where there is little:
benchmarks/fragmentation.py). Closed forms do not know better; a replay of the very step does."""
_FRAGMENTATION_RANGE: Mapping[Recompute, tuple[float, float]] = {
    "none": (0.02, 0.29),
    "selective": (0.02, 0.29),
    "full": (0.04, 0.88),
}
"""The least and the most of these replays."""


@dataclass(frozen=True)
class Phase:
    """A phase of a step on one stage, for a micro-batch of some rows.

    Attributes:
        name: In words.
        stage: Of the pipeline.
        parts: Bytes of each part.
    """

    name: str
    stage: int
    parts: Mapping[str, float]

    @property
    def bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def breakdown(self) -> dict[str, int]:
        """Whole bytes of every part."""
        return {part: math.ceil(self.parts.get(part, 0.0)) for part in PARTS}


class StepMemory(ABC):
    """The memory of a method on its worst rank.

    Args:
        architecture: The model.
        recipe: What is trained and how.
        method: How the step is divided.
        device: `cuda`, or `cpu`: where nothing but tensors counts.
        overhead: What a process takes besides on a GPU; None: what is likely on this one.
        gpu: Which kernels compute.
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        method: Method,
        device: str = "cuda",
        overhead: ProcessOverhead | None = None,
        gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    ) -> None:
        self.architecture, self.recipe, self.method = architecture, recipe, method
        self.device, self.gpu = device, gpu
        self.overhead = (overhead or ProcessOverhead.of(gpu)) if device == "cuda" else ProcessOverhead.none()
        self.context = self.overhead.total(method, trainer=recipe.by_trainer)
        self.fragmentation = FRAGMENTATION[method.recompute] if device == "cuda" else 0.0

    @abstractmethod
    def phases(self, rows: int) -> Sequence[Phase]:
        """All phases of all stages, for micro-batches of so many rows."""

    @property
    @abstractmethod
    def host(self) -> int:
        """Bytes of host memory for what a rank keeps there: of the rank that keeps most."""

    def worst(self, rows: int) -> Phase:
        """The phase that takes most memory."""
        return max(self.phases(rows), key=lambda phase: phase.bytes)

    def peak(self, rows: int) -> int:
        """Bytes of the worst rank, the context included."""
        return sum(self.worst(rows).breakdown.values())

    def at(self, stage: int, rows: int) -> Phase:
        """The phase of one stage that takes most memory."""
        own = [phase for phase in self.phases(rows) if phase.stage == stage]
        return max(own, key=lambda phase: phase.bytes)

    def interval(self, rows: int) -> tuple[int, int]:
        """The least and the most that `peak` may be, by what is not known of the context, NCCL and fragmentation."""
        found = self.worst(rows).breakdown
        known = sum(found.values()) - found["fragmentation"] - found["context"]
        transient = found["fragmentation"] / self.fragmentation if self.fragmentation else 0.0
        ends = []
        for most in (False, True):
            context = self.overhead.total(self.method, most, self.recipe.by_trainer)
            share = _FRAGMENTATION_RANGE[self.method.recompute][most] if self.fragmentation else 0.0
            ends.append(round(known + share * transient + context))
        return ends[0], ends[1]


def in_flight(stages: int, micro_batches: int) -> tuple[int, ...]:
    """`[S]` the most micro-batches of each stage of 1F1B between their forward and backward pass."""
    template = one_f_one_b(stages, plain([micro_batches]))
    return tuple(most_in_flight((actions,)) for actions in template)
