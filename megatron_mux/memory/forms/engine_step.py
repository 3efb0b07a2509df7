"""The memory of a step of the engine: a hybrid task of all adapters on every stage, in micro-batches that are alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

import numpy as np

from megatron_mux.backbone.split import even_split, stage_layers
from megatron_mux.memory.forms.engine_memory import EngineMemory, Passes, Rows
from megatron_mux.memory.forms.phases import TRANSIENT, Phase, StepMemory, in_flight

_in_flight = lru_cache(maxsize=256)(in_flight)


class EngineStepMemory(StepMemory):
    """See `StepMemory`; the recipe has adapters."""

    @cached_property
    def memory(self) -> EngineMemory:
        """What lasts, and what micro-batches keep and take; fragmentation is a part of its own here."""
        split = even_split(len(self.architecture.layers), self.method.pipeline)
        return EngineMemory(
            self.architecture,
            self.recipe.adapters,
            stage_layers(split),
            self.method,
            self.recipe.size,
            self.recipe.mean_length,
            self.device,
            self.gpu,
            fragmentation=False,
        )

    @property
    def host(self) -> int:
        """See `StepMemory.host`: the backbone's weights."""
        if not self.method.offload:
            return 0
        shares = self.method.zero == 3
        values = (s.divided(self.method) if shares else s.values for s in self.memory.stages)
        return round(max(values) * self.recipe.size)

    def phases(self, rows: int) -> list[Phase]:
        """See `StepMemory.phases`."""
        found = self.memory.passes(self._rows(rows), self.method.micro_batches)
        return [phase for stage in range(self.method.pipeline) for phase in self._of_stage(stage, found)]

    def _rows(self, rows: int) -> Rows:
        """Of a micro-batch in which each task has its portion, every row labelled."""
        portions = self.recipe.portions
        shares = np.array([portion.share for portion in portions])
        prefixes = [
            portion.share / portion.length * task.virtual_tokens
            for task, portion in zip(self.recipe.adapters, portions, strict=True)
        ]
        total = np.array([float(rows)])
        return Rows(shares[None, :] * rows, total, total, sum(prefixes) * total)

    def _of_stage(self, stage: int, found: Passes) -> Iterator[Phase]:
        lasting = self.memory.lasting
        count = _in_flight(self.method.pipeline, self.method.micro_batches)[stage]
        kept, messages = count * float(found.kept[0, stage]), float(found.messages[0, stage])
        if found.logits[0, stage]:
            yield self._phase(
                "the loss",
                stage,
                activations=kept + float(found.loss[0, stage]),
                logits=float(found.logits[0, stage]),
                communication=messages + float(lasting.head_in_use[stage]),
            )
        yield self._phase(
            "the last layer's backward pass",
            stage,
            activations=kept + float(found.recomputed[0, stage]),
            workspace=float(found.workspace[0, stage]),
            communication=messages + float(lasting.in_use[stage]),
        )
        yield self._phase("the optimizer's step", stage, workspace=float(self.memory.step_scratch[stage]))

    def _phase(self, name: str, stage: int, **parts: float) -> Phase:
        """A phase with what lasts: gradients too, which are there from the second micro-batch on, and in trials."""
        lasting = self.memory.lasting
        transient = sum(size for part, size in parts.items() if part in TRANSIENT)
        found = {
            "parameters": float(lasting.parameters[stage]),
            "adapters": float(lasting.adapters[stage]),
            "gradients": float(lasting.gradients[stage]),
            "optimizer": float(lasting.moments[stage]),
            "context": float(self.context),
            **parts,
            "fragmentation": self.fragmentation * transient,
        }
        found["workspace"] = found.get("workspace", 0.0) + self.overhead.blas
        found["communication"] = found.get("communication", 0.0) + float(lasting.buffer[stage])
        return Phase(name, stage, found)
