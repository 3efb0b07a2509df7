"""The memory of full fine-tuning: every parameter is trained, by the code of `transformers`.

What the forward and backward pass allocate comes from a `StepProfile`, read from traces of this very model. Weights,
gradients, optimizer states and how ranks divide all of them are closed forms. One GPU and data parallelism are met
exactly; pipeline stages and tensor ranks get their share of the same step, although Megatron-LM, which runs those, has
kernels of its own.

Shapes: T rows (tokens) of a micro-batch, L layers, N samples of the profile, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.phases import AT, PARTS, Array, Phases, StepMemory, in_flight
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage
from megatron_mux.memory.step_profile import (
    ACTIVATIONS,
    BACKWARD,
    EMBEDDING,
    FORWARD,
    LOGITS,
    LOSS,
    WORKSPACE,
    Profiles,
    Samples,
    StepProfile,
)

_NAMES = {
    FORWARD: "the end of the forward pass",
    LOSS: "the loss",
    BACKWARD: "a layer's backward pass",
    EMBEDDING: "the embedding's backward pass",
}
_OPTIMIZER = "the optimizer's step"


class _Linear(NamedTuple):
    """All phases as functions of the rows.

    Attributes:
        fixed: `[C, P]` constant bytes of each part.
        per_row: `[C, P]` bytes per row.
    """

    names: Sequence[str]
    stages: npt.NDArray[np.int64]
    fixed: Array
    per_row: Array


class FullTrainingMemory(StepMemory):
    """See `StepMemory`; the recipe has no adapters.

    Args:
        profiles: The step on one GPU.
        more: Further arguments of `StepMemory`.
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        method: ParallelConfig,
        profiles: Profiles,
        **more: Any,
    ) -> None:
        super().__init__(architecture, recipe, method, **more)
        self._profiles = profiles
        self._linear = cache(self._all_phases)

    def tensors(self, rows: int) -> Phases:
        """See `StepMemory.tensors`."""
        found = self._linear(rows <= self.recipe.length)
        return Phases(found.names, found.stages, found.fixed + found.per_row * rows)

    @cached_property
    def buffers(self) -> Array:
        """See `StepMemory.buffers`: the buckets of torch's `DistributedDataParallel`."""
        size = self.recipe.gradient_size if self._has_buckets else 0
        return np.array([float(stage.values * size) for stage in self.stages])

    def hosted(self, stage: Stage) -> float:
        """See `StepMemory.hosted`: the optimizer's states, and gradients to step with."""
        return self._all_states(stage) + self._stepped(stage) * self.recipe.gradient_size

    def _all_phases(self, single: bool) -> _Linear:
        """The phases of all stages; `single`: of one sequence alone."""
        profile = self._profiles(self.method.recompute == "full", single)
        names: list[str] = []
        stage_of, sizes = [], []
        for stage in self.stages:
            for own, found in self._of_stage(stage, profile):
                names += own
                stage_of += [stage.index] * len(own)
                sizes.append(found)
        both = np.concatenate(sizes)
        return _Linear(names, np.array(stage_of), both[..., 0], both[..., 1])

    # -- weights, gradients, optimizer states

    def _of_stage(self, stage: Stage, profile: StepProfile) -> Iterator[tuple[list[str], Array]]:
        """Names and `[C, P, 2]` bytes of a stage's phases: a constant, and bytes per row."""
        persistent = np.zeros((len(PARTS), 2))
        values = stage.divided(self.method) if self.method.zero == 3 else stage.values
        persistent[AT["parameters"], 0] = values * self.recipe.weight_size
        persistent[AT["parameters"], 0] += profile.buffers * len(stage.layers) / len(self.architecture.layers)
        persistent[AT["optimizer"], 0] = 0.0 if self.method.offload else self._all_states(stage)
        gradients = self._gradients(stage)
        yield self._passes(stage, profile, persistent, gradients)
        step = persistent + gradients
        step[AT["workspace"], 0] += self._step(stage)
        yield [_OPTIMIZER], step[None]

    @property
    def _gradients_stay(self) -> bool:
        """Whether buffers of gradients outlive a pass: they are summed over micro-batches or over ranks."""
        stays = self.method.micro_batches > 1 or self.recipe.has_master
        return stays or (self.method.data > 1 and not self._has_buckets)

    @property
    def _has_buckets(self) -> bool:
        """Whether torch's `DistributedDataParallel` sums gradients over ranks: in buckets, copies of them all."""
        return self.recipe.by_trainer and self.method.data > 1 and not self.method.zero

    def _gradients(self, stage: Stage) -> Array:
        """`[P, 2]` bytes of all gradients."""
        found, size = np.zeros((len(PARTS), 2)), self.recipe.gradient_size
        found[AT["gradients"], 0] = (
            stage.values if self.method.zero < 2 else stage.divided(self.method)
        ) * size
        if self.method.zero >= 2:  # a layer's are whole until they have been summed over ranks
            found[AT["communication"], 0] = stage.largest * size
        return found

    def _all_states(self, stage: Stage) -> float:
        """Bytes that the optimizer has for a stage's weights, master copies included."""
        recipe, values = self.recipe, stage.values
        states = recipe.keeps.states(values, stage.shapes, recipe.gradient_size)
        return self._stepped(stage) / values * (recipe.master_size * values + states)

    def _stepped(self, stage: Stage) -> int:
        """Number of a stage's values whose optimizer step each data-parallel rank computes."""
        return stage.divided(self.method) if self.method.zero else stage.values

    def _step(self, stage: Stage) -> float:
        """Temporary bytes of the optimizer's step; none for the optimizers of Megatron's mixed precision."""
        if self.method.offload or self.recipe.has_master:
            return 0.0
        values, size = stage.values, self.recipe.gradient_size
        return self._stepped(stage) / values * self.recipe.keeps.step(values, stage.shapes, size)

    # -- the forward and backward pass

    def _passes(
        self, stage: Stage, profile: StepProfile, persistent: Array, gradients: Array
    ) -> tuple[list[str], Array]:
        """Names and `[C, P, 2]` bytes of the samples of a stage's passes."""
        samples = self._samples(stage, profile)
        found = np.repeat(persistent[None], len(samples.layer), axis=0)
        rows = self._divided(samples.bytes) / [1, profile.length]
        found[:, AT["activations"]] += rows[:, ACTIVATIONS] + self._kept_below(stage, profile, samples.layer)
        found[:, AT["logits"]] += rows[:, LOGITS]
        found[:, AT["workspace"]] += rows[:, WORKSPACE]
        if self._gradients_stay:
            found += gradients
            found[:, AT["workspace"], 0] += samples.new_gradient / self.method.tensor
        else:
            found += gradients * samples.gradients[:, None, None]
        if self.method.zero == 3:  # weights are gathered for use; during the loss none of the layers'
            outside = samples.section == LOSS
            brought = np.where(outside, stage.counts[-1].total, stage.two_in_use)
            found[:, AT["communication"], 0] += brought * self.recipe.size
        return [self._name(stage, *one) for one in zip(samples.section, samples.layer, strict=True)], found

    def _samples(self, stage: Stage, profile: StepProfile) -> Samples:
        """The samples of the profile that belong to a stage."""
        samples = profile.samples
        inside = (samples.layer >= stage.layers.start) & (samples.layer < stage.layers.stop)
        chosen = (samples.section == BACKWARD) & inside
        if stage.last:
            chosen |= np.isin(samples.section, (FORWARD, LOSS))
        if stage.first:
            chosen |= samples.section == EMBEDDING
        return samples[chosen]

    def _kept_below(self, stage: Stage, profile: StepProfile, layer: npt.NDArray[np.int64]) -> Array:
        """`[N, 2]` bytes that a stage's layers below one keep, and all of them for other micro-batches in flight."""
        kept = profile.kept
        if self.method.recompute == "selective":
            kept = kept - profile.scores
        kept = self._divided(kept[:, None])[:, 0] / [1, profile.length]
        below = np.concatenate([np.zeros((1, 2)), np.cumsum(kept, axis=0)])
        first, behind = stage.layers.start, stage.layers.stop
        others = in_flight(stage.count, self.method.micro_batches)[stage.index] - 1
        found: Array = below[np.clip(layer, first, behind)] - below[first]
        found = found + others * (below[behind] - below[first])
        if not stage.last:  # what was sent to the next stage
            found[:, 1] += (others + 1) * self.architecture.hidden * self.recipe.size
        return found

    def _divided(self, sizes: Array) -> Array:
        """A tensor rank's share of `[..., 3 or 1, 2]` bytes; hidden states are whole without sequence parallelism."""
        if (
            self.recipe.autocast and self.method.zero == 3
        ):  # FSDP gathers half precision: autocast copies nothing
            sizes = sizes * [0, 1]
        tensor = self.method.tensor
        if tensor == 1 or self.method.sequence_parallel:
            return sizes / tensor
        # Inputs and outputs of two norms.
        whole = 4 * self.architecture.hidden * self.recipe.size * self.recipe.length
        undivided = np.zeros_like(sizes)
        undivided[..., ACTIVATIONS, 1] = np.clip(sizes[..., ACTIVATIONS, 1], 0, whole)
        found: Array = undivided + (sizes - undivided) / tensor
        return found

    @staticmethod
    def _name(stage: Stage, section: int, layer: int) -> str:
        if section == BACKWARD and layer == stage.layers.stop - 1:
            return "the last layer's backward pass"
        if section == BACKWARD and layer == stage.layers.start:
            return "the first layer's backward pass"
        return _NAMES[int(section)]
