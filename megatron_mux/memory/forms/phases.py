"""The memory of a training step: bytes by part in the phases that may be a rank's peak."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.gpus import Gpu
from megatron_mux.memory.estimate import process_overhead
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import ParallelConfig, Recompute
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage, stages
from megatron_mux.memory.untraced import THREADS, cublas_of
from megatron_mux.pipeline.template import most_in_flight, one_f_one_b, plain

Array = npt.NDArray[np.float64]

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
"""The parts of a rank's memory. `activations`: what passes keep, including autocast's copies of weights;
`communication`: weights gathered or copied for use (of tasks' backbones these are in `workspace`), gradients copied to
be reduced; `fragmentation`: held by the allocator, but unused; `context`: not allocated through the allocator."""

AT: Mapping[str, int] = {part: place for place, part in enumerate(PARTS)}
"""The columns of parts in arrays of bytes."""
_TRANSIENT = [AT[part] for part in ("activations", "logits", "workspace", "communication")]
"""Parts that are allocated and freed within a step, and so leave fragments."""

FRAGMENTATION: Mapping[Recompute, float] = {"none": 0.07, "selective": 0.07, "full": 0.26}
"""Fragmentation as a share of these parts: medians of replays of dry-run and traced steps, in the least memory
in which they run (2 to 29% where all is kept, 4 to 88% where layers are recomputed, most where there is little:
benchmarks/fragmentation.py). A replay of the step itself is more precise."""
_FRAGMENTATION_RANGE: Mapping[Recompute, tuple[float, float]] = {
    "none": (0.02, 0.29),
    "selective": (0.02, 0.29),
    "full": (0.04, 0.88),
}
"""The least and the most of these replays."""


class Phases(NamedTuple):
    """Moments of a step that may be its peak.

    Shapes: C moments, P parts.

    Attributes:
        names: `[C]` names of the moments, in words.
        stages: `[C]` pipeline stages.
        bytes: `[C, P]` bytes of each part.
    """

    names: Sequence[str]
    stages: npt.NDArray[np.int64]
    bytes: Array

    def at(self, index: int) -> Phase:
        """One of them."""
        sizes = map(math.ceil, self.bytes[index].tolist())
        return Phase(self.names[index], int(self.stages[index]), dict(zip(PARTS, sizes, strict=True)))


class Phase(NamedTuple):
    """A phase of a step on one stage, for a micro-batch of some rows."""

    name: str
    stage: int
    breakdown: Mapping[str, int]


class StepMemory(ABC):
    """The memory of a method on its worst rank.

    Args:
        device: `cuda`, or `cpu`, where only tensors are counted.
        gpu: The GPU, which decides about kernels.
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        method: ParallelConfig,
        device: str = "cuda",
        gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    ) -> None:
        self.architecture, self.recipe, self.method = architecture, recipe, method
        self.device, self.gpu = device, gpu
        self._has_overhead = device == "cuda"
        self._workspaces = THREADS * cublas_of(gpu) if self._has_overhead else 0
        self._fragmentation = FRAGMENTATION[method.recompute] if self._has_overhead else 0.0

    @abstractmethod
    def tensors(self, rows: int) -> Phases:
        """Bytes of tensors in all phases of all stages, for micro-batches of `rows` rows; in fresh arrays."""

    @property
    @abstractmethod
    def buffers(self) -> Array:
        """`[S]` bytes of the buffers in which each stage's gradients are reduced, which leave no fragments."""

    @abstractmethod
    def hosted(self, stage: Stage) -> float:
        """Bytes that offloading keeps in host memory for a rank of a stage."""

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages, with layers divided as evenly as possible."""
        return stages(self.architecture, self.method)

    @property
    def host(self) -> int:
        """Bytes of host memory of the rank that keeps most there."""
        return round(max(map(self.hosted, self.stages))) if self.method.offload else 0

    def phases(self, rows: int) -> list[Phase]:
        """The highest of each stage's phases of a name, for micro-batches of `rows` rows."""
        found, highest = self._all(rows), dict[tuple[int, str], int]()
        totals = found.bytes.sum(axis=1)
        for index, key in enumerate(zip(found.stages.tolist(), found.names, strict=True)):
            if key not in highest or totals[index] > totals[highest[key]]:
                highest[key] = index
        return [found.at(index) for index in highest.values()]

    def worst(self, rows: int) -> Phase:
        """The phase that takes most memory."""
        found = self._all(rows)
        return found.at(int(found.bytes.sum(axis=1).argmax()))

    def peak(self, rows: int) -> int:
        """Bytes of the worst rank, the context included."""
        return sum(self.worst(rows).breakdown.values())

    def interval(self, rows: int) -> tuple[int, int]:
        """Lower and upper bound of `peak`: context, NCCL and fragmentation are uncertain."""
        found = self.worst(rows).breakdown
        known = sum(found.values()) - found["fragmentation"] - found["context"]
        transient = found["fragmentation"] / self._fragmentation if self._fragmentation else 0.0
        ends = []
        for most in (False, True):
            share = _FRAGMENTATION_RANGE[self.method.recompute][most] if self._fragmentation else 0.0
            ends.append(round(known + share * transient + self._context(most)))
        return ends[0], ends[1]

    def _all(self, rows: int) -> Phases:
        """Bytes of tensors, fragmentation, context and workspaces in all phases."""
        found = self.tensors(rows)
        found.bytes[:, AT["fragmentation"]] = self._fragmentation * found.bytes[:, _TRANSIENT].sum(axis=1)
        found.bytes[:, AT["context"]] = self._context()
        found.bytes[:, AT["workspace"]] += self._workspaces
        found.bytes[:, AT["communication"]] += self.buffers[found.stages]
        return found

    def _context(self, most: bool | None = None) -> int:
        """Bytes outside the allocator; `most`: the upper (True) or lower (False) bound, None for the likely value."""
        if not self._has_overhead:
            return 0
        # All ranks of `transformers.Trainer` are data-parallel, in torch's default group alone.
        trainer = self.recipe.by_trainer
        return process_overhead(int(self.method.gpus > 1) if trainer else self.method.communicators, most)


@lru_cache(maxsize=256)
def in_flight(stages: int, micro_batches: int) -> tuple[int, ...]:
    """`[S]` the most micro-batches of each stage of 1F1B between their forward and backward pass."""
    template = one_f_one_b(stages, plain([micro_batches]))
    return tuple(most_in_flight((actions,)) for actions in template)
