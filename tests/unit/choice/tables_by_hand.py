"""Tables of tasks on architectures that are numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_mux.choice.engine_step import TaskMemory
from megatron_mux.footprint.content import COUNTS
from megatron_mux.footprint.memory import Memory, groups_of
from megatron_mux.footprint.signature import Signature
from megatron_mux.footprint.table import LOSS, Group, PassTable, PersistentBytes, StageTable
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.method import ParallelConfig
from megatron_mux.memory.forms.recipe import Recipe
from megatron_mux.memory.forms.stages import Stage, stages

BACKWARD = "a layer's backward pass"
KEPT, TAKEN = 20, 4
"""Hidden states that a layer keeps, and that its backward pass takes."""
CHUNK = 1 << 13
"""Rows whose logits are computed at once."""
SUMS = 1 << 18
"""The most bytes of the buffer in which gradients are summed."""


class TablesByHand:
    """A layer keeps `KEPT` hidden states, or one if it is recomputed; each task's rows keep another byte.

    Args:
        architecture: The model.
        recipe: With the tasks.
    """

    def __init__(self, architecture: Architecture, recipe: Recipe) -> None:
        self._architecture, self._recipe = architecture, recipe
        self.prepared: list[ParallelConfig] = []

    def prepare(self, methods: Sequence[ParallelConfig], known: Callable[[ParallelConfig], None]) -> None:
        """See `Tables`; methods are known in another order than they are asked for."""
        self.prepared += methods
        for method in reversed(methods):
            known(method)

    def __call__(self, method: ParallelConfig) -> TaskMemory:
        """See `Tables`."""
        count = len(self._recipe.adapters)
        signatures = [Signature(str(number), 0) for number in range(count)]
        own = stages(self._architecture, method)
        divided = method.tensor if method.sequence_parallel else 1
        message = self._architecture.hidden * self._recipe.size / divided
        memory = Memory(
            signatures,
            [self._table(stage, method, signatures) for stage in own],
            [len(stage.layers) for stage in own],
            CHUNK,
            message,
            method.pipeline,
            method.tensor == 1 and method.zero != 3,
            SUMS * (method.data > 1),
        )
        return TaskMemory([memory], range(count), np.ones(count))

    def _table(self, stage: Stage, method: ParallelConfig, signatures: Sequence[Signature]) -> StageTable:
        recipe = self._recipe
        values = np.array([task.values(stage.layers, method.tensor) for task in recipe.adapters])
        weights = 0.0 if method.offload else stage.values * recipe.size / (method.data if method.zero else 1)
        hidden = self._architecture.hidden * recipe.size / (method.tensor if method.sequence_parallel else 1)
        passes: dict[Group, PassTable] = {}
        for group in groups_of(signatures):
            rows = slice(len(COUNTS), len(COUNTS) + len(group))
            kept, backward, loss = (np.zeros(len(COUNTS) + 2 * len(group)) for _ in range(3))
            kept[rows] = len(stage.layers) * hidden * (1 if method.recompute == "full" else KEPT)
            kept[rows] += np.array(group) + 1.0
            backward[rows] = TAKEN * hidden
            if stage.last:
                loss[COUNTS.index("labels of a chunk")] = (
                    recipe.size * self._architecture.vocabulary / method.tensor
                )
            moments = np.stack([kept + loss, kept + backward])
            names = (LOSS if stage.last else BACKWARD, BACKWARD)
            passes[group] = PassTable(kept, np.zeros_like(kept), moments, np.zeros(2), names)
        persistent = PersistentBytes(weights, 18 * values, values, 4 * values, 8 * values)
        nothing = PersistentBytes(0.0, *(np.zeros(len(values)) for _ in range(4)))
        return StageTable(len(stage.layers), persistent, nothing, passes)
