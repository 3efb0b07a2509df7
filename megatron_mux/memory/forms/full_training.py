"""The memory of full fine-tuning: every parameter is trained, by the code of `transformers`.

What the forward and backward pass allocate comes from a `StepProfile`, read from traces of this very model at this
sequence length. Weights, gradients, optimizer states and how ranks divide all of them are closed forms. One GPU and
data parallelism are met exactly; pipeline stages and tensor ranks get their share of the same step, although
Megatron-LM, which runs those, has kernels of its own.

Shapes: T rows (tokens) of a micro-batch, L layers, N samples of the profile, P parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.phases import PARTS, TRANSIENT, Phase, StepMemory, in_flight
from megatron_mux.memory.forms.process_overhead import ProcessOverhead
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage, stages
from megatron_mux.memory.step_profile import (
    ACTIVATIONS,
    BACKWARD,
    EMBEDDING,
    FORWARD,
    LOGITS,
    LOSS,
    WORKSPACE,
    Samples,
    StepProfile,
)

Array = npt.NDArray[np.float64]

_NAMES = {
    FORWARD: "the end of the forward pass",
    LOSS: "the loss",
    BACKWARD: "a layer's backward pass",
    EMBEDDING: "the embedding's backward pass",
}
_OPTIMIZER = "the optimizer's step"
_IS_TRANSIENT = np.array([part in TRANSIENT for part in PARTS])
_AT = {part: place for place, part in enumerate(PARTS)}

_in_flight = lru_cache(maxsize=256)(in_flight)


class _Candidates(NamedTuple):
    """Moments of a step that may be the peak; bytes by part are a constant and so many per row.

    Shapes: C candidates.
    """

    names: list[str]
    stage: npt.NDArray[np.int64]
    fixed: Array
    per_row: Array

    def at(self, index: int, rows: int) -> Phase:
        """One of them for so many rows."""
        found = self.fixed[index] + self.per_row[index] * rows
        return Phase(self.names[index], int(self.stage[index]), dict(zip(PARTS, found.tolist(), strict=True)))


class FullTrainingMemory(StepMemory):
    """See `StepMemory`; the recipe has no adapters.

    Args:
        architecture: The model.
        recipe: What is trained and how.
        method: How the step is divided.
        profile: The step on one GPU, with all layers recomputed if the method recomputes them.
        device: See `StepMemory`.
        overhead: See `StepMemory`.
        gpu: See `StepMemory`.
    """

    def __init__(
        self,
        architecture: Architecture,
        recipe: Recipe,
        method: Method,
        profile: StepProfile,
        device: str = "cuda",
        overhead: ProcessOverhead | None = None,
        gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    ) -> None:
        super().__init__(architecture, recipe, method, device, overhead, gpu)
        self._profile = profile

    def phases(self, rows: int) -> list[Phase]:
        """See `StepMemory.phases`."""
        found, totals = self._candidates, self._totals(rows)
        highest: dict[tuple[int, str], int] = {}
        for index, key in enumerate(zip(found.stage.tolist(), found.names, strict=True)):
            if key not in highest or totals[index] > totals[highest[key]]:
                highest[key] = index
        return [found.at(index, rows) for index in highest.values()]

    def worst(self, rows: int) -> Phase:
        """See `StepMemory.worst`."""
        return self._candidates.at(int(self._totals(rows).argmax()), rows)

    @property
    def host(self) -> int:
        """See `StepMemory.host`: the optimizer's states, and gradients to step with."""
        if not self.method.offload:
            return 0
        return round(
            max(
                self._all_states(stage) + self._stepped(stage) * self.recipe.gradient_size
                for stage in self._stages
            )
        )

    @cached_property
    def _stages(self) -> list[Stage]:
        return stages(self.architecture, self.method)

    @cached_property
    def _candidates(self) -> _Candidates:
        names: list[str] = []
        stage_of, fixed, per_row = [], [], []
        for stage in self._stages:
            for name, one in self._of_stage(stage):
                one[:, _AT["fragmentation"]] = self.fragmentation * one[:, _IS_TRANSIENT].sum(axis=1)
                one[:, _AT["workspace"], 0] += self.overhead.blas
                one[:, _AT["communication"], 0] += self._buckets(stage)
                names += name
                stage_of += [stage.index] * len(name)
                fixed.append(one[..., 0])
                per_row.append(one[..., 1])
        return _Candidates(names, np.array(stage_of), np.concatenate(fixed), np.concatenate(per_row))

    @cached_property
    def _sums(self) -> tuple[Array, Array]:
        return self._candidates.fixed.sum(axis=1), self._candidates.per_row.sum(axis=1)

    def _totals(self, rows: int) -> Array:
        fixed, per_row = self._sums
        found: Array = fixed + per_row * rows
        return found

    # -- weights, gradients, optimizer states

    def _of_stage(self, stage: Stage) -> Iterator[tuple[list[str], Array]]:
        """Names and `[C, P, 2]` bytes of a stage's candidates, without fragmentation and what lasts unseen."""
        lasting = np.zeros((len(PARTS), 2))
        lasting[_AT["context"], 0] = self.context
        values = stage.divided(self.method) if self.method.zero == 3 else stage.values
        lasting[_AT["parameters"], 0] = values * self.recipe.weight_size
        lasting[_AT["optimizer"], 0] = 0.0 if self.method.offload else self._all_states(stage)
        gradients = self._gradients(stage)
        yield self._passes(stage, lasting, gradients)
        step = lasting + gradients
        step[_AT["workspace"], 0] += self._step(stage)
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

    def _buckets(self, stage: Stage) -> int:
        return stage.values * self.recipe.gradient_size if self._has_buckets else 0

    def _gradients(self, stage: Stage) -> Array:
        """`[P, 2]` bytes of all gradients."""
        found, size = np.zeros((len(PARTS), 2)), self.recipe.gradient_size
        found[_AT["gradients"], 0] = (
            stage.values if self.method.zero < 2 else stage.divided(self.method)
        ) * size
        if self.method.zero >= 2:  # a unit's are whole until they have been summed over ranks
            found[_AT["communication"], 0] = stage.largest * size
        return found

    def _all_states(self, stage: Stage) -> float:
        share = self._stepped(stage) / stage.values
        return share * self.recipe.states(stage.values, stage.shapes)

    def _stepped(self, stage: Stage) -> int:
        """Values of a stage that each data-parallel rank steps."""
        return stage.divided(self.method) if self.method.zero else stage.values

    def _step(self, stage: Stage) -> float:
        """Bytes that the optimizer's step makes anew."""
        if self.method.offload:
            return 0.0
        share = self._stepped(stage) / stage.values
        return share * self.recipe.step(stage.values, stage.shapes)

    # -- the forward and backward pass

    def _passes(self, stage: Stage, lasting: Array, gradients: Array) -> tuple[list[str], Array]:
        """Names and `[C, P, 2]` bytes of the samples of a stage's passes."""
        samples = self._samples(stage)
        found = np.repeat(lasting[None], len(samples.layer), axis=0)
        rows = self._divided(samples.bytes) / [1, self._profile.length]
        found[:, _AT["activations"]] += rows[:, ACTIVATIONS] + self._kept_below(stage, samples.layer)
        found[:, _AT["logits"]] += rows[:, LOGITS]
        found[:, _AT["workspace"]] += rows[:, WORKSPACE]
        if self._gradients_stay:
            found += gradients
            found[:, _AT["workspace"], 0] += samples.new_gradient / self.method.tensor
        else:
            found += gradients * samples.gradients[:, None, None]
        if self.method.zero == 3:  # weights are gathered for use; during the loss none of the layers'
            outside = samples.section == LOSS
            brought = np.where(outside, stage.units[-1].total, stage.two_in_use)
            found[:, _AT["communication"], 0] += brought * self.recipe.size
        return [self._name(stage, *one) for one in zip(samples.section, samples.layer, strict=True)], found

    def _samples(self, stage: Stage) -> Samples:
        """Those of the profile that are of a stage."""
        samples = self._profile.samples
        inside = (samples.layer >= stage.layers.start) & (samples.layer < stage.layers.stop)
        chosen = (samples.section == BACKWARD) & inside
        if stage.last:
            chosen |= np.isin(samples.section, (FORWARD, LOSS))
        if stage.first:
            chosen |= samples.section == EMBEDDING
        return samples[chosen]

    def _kept_below(self, stage: Stage, layer: npt.NDArray[np.int64]) -> Array:
        """`[N, 2]` bytes that a stage's layers below one keep, and all of them for other micro-batches in flight."""
        kept = self._profile.kept
        if self.method.recompute == "selective":
            kept = kept - self._profile.scores
        kept = self._divided(kept[:, None])[:, 0] / [1, self._profile.length]
        below = np.concatenate([np.zeros((1, 2)), np.cumsum(kept, axis=0)])
        first, behind = stage.layers.start, stage.layers.stop
        others = _in_flight(stage.count, self.method.micro_batches)[stage.index] - 1
        found: Array = below[np.clip(layer, first, behind)] - below[first]
        found = found + others * (below[behind] - below[first])
        if not stage.last:  # what was sent to the next stage
            found[:, 1] += (others + 1) * self.architecture.hidden * self.recipe.size
        return found

    def _divided(self, sizes: Array) -> Array:
        """A tensor rank's share of `[..., 3 or 1, 2]` bytes: of hidden states all, unless rows are divided, too."""
        if self._copies_are_gathered:
            sizes = sizes * [0, 1]
        tensor = self.method.tensor
        if tensor == 1 or self.method.sequence_parallel:
            return sizes / tensor
        # Inputs and outputs of two norms.
        whole = 4 * self.architecture.hidden * self.recipe.size * self._profile.length
        undivided = np.zeros_like(sizes)
        undivided[..., ACTIVATIONS, 1] = np.clip(sizes[..., ACTIVATIONS, 1], 0, whole)
        found: Array = undivided + (sizes - undivided) / tensor
        return found

    @property
    def _copies_are_gathered(self) -> bool:
        """Whether weights come in half precision (FSDP), so that autocast makes no copies of them."""
        return self.recipe.autocast and self.method.zero == 3

    @staticmethod
    def _name(stage: Stage, section: int, layer: int) -> str:
        if section == BACKWARD and layer == stage.layers.stop - 1:
            return "the last layer's backward pass"
        if section == BACKWARD and layer == stage.layers.start:
            return "the first layer's backward pass"
        return _NAMES[int(section)]
