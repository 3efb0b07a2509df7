"""The memory of the engine's ranks by closed forms, for split servers.

A rank holds memory that lasts (`EngineMemory.lasting`), and memory of micro-batches (`EngineMemory.passes`): what each
of them keeps from its forward to its backward pass, and the temporary memory of the one that is computed, which is
there once however many are in flight (equation 5 of MuxTune). All terms are constants per row, worked out once:
thousands of micro-batches are priced in one call.

Shapes: B micro-batches, K tasks, L layers, S stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms import expert_layer
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.engine_adapters import AdapterBytes, AdapterTables
from megatron_mux.memory.forms.engine_bytes import Lasting, Passes
from megatron_mux.memory.forms.engine_layer import EngineLayer
from megatron_mux.memory.forms.layer_bytes import LayerBytes, RowBytes
from megatron_mux.memory.forms.layer_kinds import LayerKinds
from megatron_mux.memory.forms.method import Method
from megatron_mux.memory.forms.stages import Stage, stages
from megatron_mux.memory.forms.task_adapters import TaskAdapters

Array = npt.NDArray[np.float64]

_ROW_INPUTS = 24
"""Bytes of a row's token, position, sequence and place in it."""
_LABEL_INPUTS = 60
"""Bytes of a labelled row's label, weight and task, and of what it has as a row of its own above attention."""


class Rows(NamedTuple):
    """Micro-batches, by their rows.

    Attributes:
        of_tasks: `[B, K]` rows of each task.
        most: `[B]` rows that must fit: at least all of them.
        labels: `[B]` labelled rows.
        copied: `[B]` rows of keys and values that attention keeps a copy of beside its own.
    """

    of_tasks: Array
    most: Array
    labels: Array
    copied: Array


@dataclass(frozen=True)
class EngineMemory:
    """The memory of tasks on a backbone divided into stages.

    Attributes:
        architecture: The backbone.
        tasks: The adapters.
        layers: The layers of each stage.
        method: How the step is divided; its `pipeline` is how many ranks share the stages, its `parts` is not used.
        size: Bytes of a value of the backbone's dtype.
        lengths: Tokens of each task's sequences.
        device: `cuda`, or `cpu`, where only tensors are counted.
        gpu: The GPU, on `cuda`.
    """

    architecture: Architecture
    tasks: Sequence[TaskAdapters]
    layers: Sequence[range]
    method: Method
    size: int
    lengths: Sequence[Sequence[float]]
    device: str = "cuda"
    gpu: Gpu = Gpu()  # noqa: RUF009  (frozen)

    # -- what lasts

    @cached_property
    def stages(self) -> list[Stage]:
        """The backbone's stages."""
        return stages(self.architecture, self.method, self.layers)

    @cached_property
    def lasting(self) -> Lasting:
        """Bytes that the ranks of every stage hold from step to step."""
        stages, tensor = self.stages, self.method.tensor
        values = np.array([[t.values(s.layers, tensor) for s in stages] for t in self.tasks])
        values = values.reshape(-1, len(stages)) * self.adapter_size  # [K, S]
        held = np.array([t.copies for t in self.tasks], np.float64) @ values
        states = [
            sum(t.states(s.layers, tensor) + t.scratch(s.layers, tensor) for t in self.tasks) for s in stages
        ]
        fixed = np.array(
            [sum(t.copies * t.fixed_values(s.layers, tensor) for t in self.tasks) for s in stages]
        )
        rounded = held / self.adapter_size * self.size * (self.size < self.adapter_size)
        return Lasting(
            parameters=np.array([float(self._weights(stage)) for stage in stages]),
            adapters=held + rounded + self.adapter_size * fixed,
            gradients=held,
            moments=self.adapter_size * np.array(states, dtype=np.float64),
        )

    @property
    def step_scratch(self) -> Array:
        """`[S]` temporary bytes of an optimizer's step."""
        return self._tables.step_scratch

    @property
    def adapter_size(self) -> int:
        """Bytes of an adapter's value: fp32, fp64 if the backbone is."""
        return max(4, self.size)

    @property
    def _brings_weights(self) -> bool:
        """Whether weights are dequantised for each use: then each layer is a graph of its own."""
        return any(unit.dequantised for unit in self.architecture.layers)

    def _weights(self, stage: Stage) -> int:
        return stage.bytes(self.method, self.size) + self._wide_routers(stage)

    def _wide_routers(self, stage: Stage) -> int:
        """Bytes that routers take more than other weights, because some are kept in fp32."""
        a = self.architecture
        if a.moe is None or not a.moe.routing.fp32_product:
            return 0
        return sum(map(a.has_experts, stage.layers)) * a.moe.count * a.hidden * max(0, 4 - self.size)

    # -- what passes keep and take

    def passes(self, rows: Rows) -> Passes:
        """Bytes that micro-batches keep and take on every stage.

        Args:
            rows: The micro-batches.
        """
        most = rows.most[:, None]
        # Whoever may need more rows than its tasks have now, has them of the same tasks.
        share = rows.most / np.maximum(rows.of_tasks.sum(axis=1), 1e-9)
        of_tasks = rows.of_tasks * share[:, None]
        kept_of = [own.at(of_tasks) for own in self._row_bytes]
        tasks = self._tables.at(of_tasks, kept_of, self._brings_weights)
        of_stage, layer_input = self._tables.of_stage, self._layer.input
        trained = tasks.trained @ of_stage
        trains = trained > 0
        labels = np.minimum(rows.labels, rows.most)
        of_layers = self._kept_of_layers(rows, labels, kept_of, tasks)
        kept = of_layers @ of_stage
        if not self._brings_weights:
            # Else even embedded tokens are tied to the weights' coming.
            kept = kept - most * tasks.below_first
        sends = np.array([not stage.last for stage in self.stages])
        kept = kept + most * (self.row_inputs + layer_input * sends * trains) + self._copied(rows)
        # Rows of references travel in front of the others, and leave as a copy beside what both passes returned.
        referred = of_tasks @ np.array([task.refers for task in self.tasks], np.float64).reshape(-1, 1)
        arrives = np.array([not stage.first for stage in self.stages])
        kept = kept + layer_input * (referred * arrives + (most * (referred > 0) + 2 * referred) * sends)
        kept = kept + (labels * _LABEL_INPUTS)[:, None]
        kept[:, -1] += self._at_the_end(rows.most, labels)
        workspace = self._most(self._workspace(most, labels, tasks) - of_layers @ self._above)
        # A gradient comes for all rows that were sent.
        workspace = np.where(trains, workspace, most * layer_input * 2) + layer_input * referred * sends
        return Passes(np.maximum(kept, 0.0), workspace)

    def _kept_of_layers(
        self, rows: Rows, labels: Array, kept_of: Sequence[LayerBytes], tasks: AdapterBytes
    ) -> Array:
        """`[B, L]` bytes that layers keep, in the last one less for rows that it leaves out.

        Args:
            rows: The micro-batches.
            labels: `[B]` labelled rows.
            kept_of: What layers that differ keep.
            tasks: What adapters keep.
        """
        most = rows.most[:, None]
        found: Array = most * (tasks.plain + tasks.inputs) + tasks.own
        if not self.method.sequence_parallel:
            # Above the last layer's attention only labelled rows are computed.
            above = kept_of[self._kinds.of_layer[-1]].above_attention + tasks.last_inputs
            left_out = rows.most - labels
            spared = left_out * above + tasks.last_own * left_out / np.maximum(rows.most, 1)
            found[:, -1] -= spared * (tasks.trained @ self._tables.of_stage[:, -1] > 0)
        return found

    def _most(self, workspace: Array) -> Array:
        """`[B, S]` of `[B, L]`, of the layer of each stage where it is most."""
        return np.stack(
            [workspace[:, np.flatnonzero(own)].max(axis=1) for own in self._tables.of_stage.T], axis=1
        )

    @cached_property
    def _above(self) -> Array:
        """`[L, L]` 1 where the first layer is above the second one, in the same stage."""
        of_stage = self._tables.of_stage
        found: Array = np.tril(of_stage @ of_stage.T, -1)
        return found

    @cached_property
    def _layer(self) -> EngineLayer:
        """A layer without experts."""
        lengths, method = [length for own in self.lengths for length in own], self.method
        length = max(1, round(sum(lengths) / max(1, len(lengths))))
        return EngineLayer(
            self.architecture,
            self.size,
            length,
            self.device,
            self.gpu,
            method.tensor,
            method.sequence_parallel,
            exchanges=method.expert * method.tensor > 1,
        )

    @cached_property
    def _kinds(self) -> LayerKinds:
        return LayerKinds.of(self._layer, self.method)

    @cached_property
    def _tables(self) -> AdapterTables:
        return AdapterTables(self._kinds, self.tasks, self.layers)

    @cached_property
    def _row_bytes(self) -> list[RowBytes]:
        prefixed = [task.virtual_tokens > 0 for task in self.tasks]
        return [RowBytes(layer, self.lengths, prefixed) for layer in self._kinds.kinds]

    @property
    def row_inputs(self) -> int:
        """Bytes of what a row is computed with: its token, position, place and angles."""
        a = self.architecture
        angles = a.rotations * a.rotary_width * self.size if a.rotary else 0
        return _ROW_INPUTS + angles

    def _workspace(self, most: Array, labels: Array, tasks: AdapterBytes) -> Array:
        """`[B, L]` for a moment, while a layer goes backward: at the worst of several moments.

        Args:
            most: `[B, 1]` rows.
            labels: `[B]` labelled rows.
            tasks: What adapters keep and take.
        """
        mlp = (
            self._kinds.each(lambda layer: layer.bytes(layer.mlp_backward()), experts=False)
            - tasks.fc2_inputs
        )
        fc2 = self._kinds.each(lambda layer: layer.bytes(layer.linear_fc2_backward()), experts=False)
        mlp = np.maximum(mlp, fc2)
        attention = self._kinds.each(lambda layer: layer.bytes(layer.attention_backward())) - tasks.fc2_inputs
        hidden = most * self._layer.input
        gone = most * self._kinds.each(lambda layer: layer.bytes(layer.mlp_gone()))
        found = np.maximum(most * np.maximum(mlp, attention), tasks.multiplied_behind + hidden)
        found = np.maximum(found, tasks.multiplied + hidden + gone)
        if self.architecture.moe is not None:
            found = np.maximum(found, self._experts_workspace(most))
        # The final norm has gone backward by then; only where layers are graphs of their own both ends stay.
        last = self._tables.of_stage[:, -1] * (not self._brings_weights)
        return found + tasks.scratch - last * self._at_the_end(most[:, 0], labels)[:, None]

    def _experts_workspace(self, most: Array) -> Array:
        """`[B, L]` the same while experts' outputs are summed, or go backward."""
        forward = self._kinds.each(lambda layer: layer.bytes(expert_layer.forward(layer)), experts=True)
        backward = self._kinds.each(lambda layer: layer.bytes(expert_layer.backward(layer)), experts=True)
        # Embedded tokens are there until the forward pass has ended.
        forward = forward + self._tables.of_stage[:, 0] * self._layer.input
        found: Array = most * np.maximum(forward, backward)
        return found

    def _at_the_end(self, most: Array, labels: Array) -> Array:
        """`[B]` bytes of the final norm's input and of the loss's gradient, and of what is gathered from its output."""
        hidden = self.architecture.hidden * self.size
        if self.method.sequence_parallel and self.method.tensor > 1:
            found: Array = labels * hidden + 2 * most * hidden / self.method.tensor
            return found
        return 2 * labels * hidden

    def _copied(self, rows: Rows) -> Array:
        """`[B, S]` bytes of keys and values that attention has concatenated with a prefix or earlier chunks."""
        a = self.architecture
        row = 2 * max(1.0, a.kv_heads / self.method.tensor) * a.head_dim * self.size
        own = (rows.copied > 0) * rows.most * self._layer.bytes(self._layer.copied_keys())
        found: Array = (rows.copied * row + own)[:, None] * self._tables.of_stage.sum(axis=0)
        return found
