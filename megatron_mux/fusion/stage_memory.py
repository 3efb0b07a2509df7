"""What a stage holds, and keeps and takes of a micro-batch: equation 5 of MuxTune, by the closed forms of `memory`.

A rank's memory has three terms here: what is always there (`resident`, and once a process `outside`); what each
micro-batch keeps from its forward to its backward pass; and what a stage takes besides while it computes one
(`working`: gradients on their way back, what is computed again, a chunk of logits). The last is there once, however
many micro-batches are in flight. All are constants per row, worked out once: thousands of hybrid tasks are cheap.

Shapes: B batches, K tasks, L layers, S stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.base_ops import BaseOpName
from megatron_mux.fusion.load import TaskLoad
from megatron_mux.gpus import Gpu
from megatron_mux.memory.forms import kept, own
from megatron_mux.memory.forms.architecture import Architecture
from megatron_mux.memory.forms.kept import Pass, Saved
from megatron_mux.memory.forms.methods import Method
from megatron_mux.memory.forms.outside import Outside
from megatron_mux.memory.forms.parts import FRAGMENTATION, ROW_INPUTS
from megatron_mux.memory.forms.shards import Stage, stages_of
from megatron_mux.memory.forms.sites import OPS, TaskAdapters
from megatron_mux.runtime import GRADIENTS_AT_ONCE

Array = npt.NDArray[np.float64]

_MLP: tuple[BaseOpName, ...] = ("linear_fc1", "linear_fc2")
_ROW_PARALLEL: tuple[BaseOpName, ...] = ("linear_proj", "linear_fc2")


class Bytes(NamedTuple):
    """`[B, S]` bytes that each stage keeps of each batch, and that it takes besides while it computes the batch."""

    kept: Array
    working: Array


class Rows(NamedTuple):
    """Batches, by their rows.

    Attributes:
        of_tasks: `[B, K]` rows of each task.
        most: `[B]` rows that memory must do for: at least all of them.
        labels: `[B]` labelled ones.
        copied: `[B]` rows of keys and values that attention keeps a copy of beside its own.
    """

    of_tasks: Array
    most: Array
    labels: Array
    copied: Array


class StageMemory:
    """The memory of tasks on a backbone divided into stages.

    Args:
        architecture: The backbone.
        loads: The tasks.
        stages: The layers of each stage.
        method: How the step is divided; its `pipeline` is not looked at.
        itemsize: Bytes of the backbone's dtype.
        device: `cuda` or `cpu`.
        gpu: Which one, on `cuda`.
    """

    def __init__(
        self,
        architecture: Architecture,
        loads: Sequence[TaskLoad],
        stages: Sequence[range],
        method: Method,
        itemsize: int,
        device: str,
        gpu: Gpu = Gpu(),  # noqa: B008  (frozen)
    ) -> None:
        self.architecture, self.method, self.itemsize = architecture, method, itemsize
        self.loads = list(loads)
        self.stages: list[Stage] = stages_of(architecture, method, stages)
        self._gpu = device == "cuda"
        self._outside = Outside.of(gpu) if self._gpu else Outside.nothing()
        sequences = sum(len(load.tokens) for load in loads)
        length = sum(load.total for load in loads) // max(1, sequences)
        self._run = Pass(itemsize, max(1, length), device=device, gpu=gpu)
        self._layers = np.array(
            [[layer in own for own in stages] for layer in range(len(architecture.layers))]
        )
        self._tasks = [_without_prefix(load.adapter) for load in loads]
        self._of_tasks = _OfTasks(self)

    # -- what is always there

    def resident(self) -> tuple[float, ...]:
        """`[S]` bytes of the backbone's part, and of the tasks' adapters with what trains them."""
        return tuple(
            self._weights(stage) + self._adapters(stage) + self._gradient_buffer(stage)
            for stage in self.stages
        )

    def outside(self, pipeline: int) -> float:
        """Bytes that a process takes besides: its context, communicators, cuBLAS's workspaces; none on a CPU.

        Args:
            pipeline: Ranks of a pipeline.
        """
        return self._outside.total(replace(self.method, pipeline=pipeline)) + self._outside.blas

    def _weights(self, stage: Stage) -> float:
        """Of weights where they live, and of those brought for use."""
        if not self._comes_and_goes:
            return stage.values * self.itemsize
        share = stage.divided(self.method) if self.method.zero == 3 else stage.values
        brought = stage.two_in_use
        if self.method.offload and self._gpu:  # on a CPU, host memory is what is counted
            return brought * self.itemsize
        return (share + brought) * self.itemsize

    def _adapters(self, stage: Stage) -> float:
        """Of values, gradients and moments: fp32, fp64 if the backbone is."""
        values = [load.adapter.values(stage.layers, self.method.tensor) for load in self.loads]
        copies = [2 if load.adapter.optimizer == "sgd" else 4 for load in self.loads]
        found = sum(count * size for count, size in zip(copies, values, strict=True))
        found += sum(load.adapter.fixed_values(stage.layers) for load in self.loads)
        return found * self.adapter_size

    def _gradient_buffer(self, stage: Stage) -> float:
        """Of the buffer that gradients are summed over ranks in."""
        if self.method.data * self.method.tensor == 1:
            return 0.0
        values = sum(load.adapter.values(stage.layers, self.method.tensor) for load in self.loads)
        return min(values, GRADIENTS_AT_ONCE) * self.adapter_size

    @property
    def _comes_and_goes(self) -> bool:
        """Whether weights live elsewhere between uses: then each layer is a graph of its own."""
        return self.method.offload or self.method.zero == 3

    @property
    def adapter_size(self) -> int:
        """Bytes of an adapter's value."""
        return max(4, self.itemsize)

    # -- what passes keep and take

    def of(self, rows: Rows) -> Bytes:
        """What batches keep and take on every stage."""
        total = rows.most[:, None]
        share = rows.most / np.maximum(rows.of_tasks.sum(axis=1), 1e-9)
        tasks = self._of_tasks.at(rows.of_tasks * share[:, None])
        entry = self._bytes([kept.entry(self.architecture, self.itemsize)])
        batch = ROW_INPUTS + (self.architecture.head_dim * self.itemsize if self.architecture.rotary else 0)
        per_layer = total * (self._plain(self._selective) + tasks.inputs) + tasks.own
        if self.method.recompute == "full":
            found = total * entry * tasks.trained
        else:
            found = tasks.trained * total * self._plain(self._selective) + total * tasks.all_inputs
            found += tasks.all_own + tasks.copies
        sends = np.array([not stage.last for stage in self.stages])
        found = found + total * (batch + entry * sends * (tasks.trained > 0))
        found += self._keys(rows.copied)
        if self.method.recompute != "full" and not self._comes_and_goes:
            first = np.array([stage.first for stage in self.stages])
            found -= total * entry * first * (tasks.trained > 0)  # embedded tokens need no gradient
        found[:, -1] += self._behind_the_layers(rows, tasks)
        working = (
            total * self._bytes(kept.workspace(self.architecture, self._run, frozen=True)) + tasks.moment
        )
        if self.method.recompute == "full":
            working = working + per_layer + tasks.largest_copies
        elif self.method.recompute == "selective":
            working = working + total * max(0.0, self._plain(False) - self._plain(True))
        working = np.where(tasks.trained > 0, working, total * entry * 2)
        working[:, -1] = np.maximum(working[:, -1], self._loss(rows))
        if len(self.stages) > 1 and self.method.tensor == 1 and self.method.zero != 3:
            working[:, 0] += (
                rows.most * entry
            )  # the zeros that stand in for an output that runs out of memory
        vain = 1 + FRAGMENTATION[self.method.recompute] * self._gpu
        return Bytes(np.maximum(found, 0.0) * vain, working * vain)

    @property
    def _selective(self) -> bool:
        return self.method.recompute == "selective"

    def _plain(self, selective: bool) -> float:
        """Bytes of a row that a layer keeps whatever the adapters."""
        return self._bytes(kept.engine(self.architecture, self._run, frozenset(), selective))

    def _keys(self, copied: Array) -> Array:
        """`[B, S]` of keys and values that attention has put together."""
        heads = max(1.0, self.architecture.kv_heads / self.method.tensor)
        row = 2 * heads * self.architecture.head_dim * self.itemsize
        found: Array = copied[:, None] * row * self._layers.sum(axis=0)
        return found

    def _behind_the_layers(self, rows: Rows, tasks: _Found) -> Array:
        """`[B]` of the final norm and the loss's gradient, less what only unlabelled rows would need: above the last
        layer's attention there are labelled ones only (not with sequence parallelism).
        """
        labels = np.minimum(rows.labels, rows.most)
        hidden = self.architecture.hidden * self.itemsize
        if self.method.sequence_parallel:
            return labels * hidden + rows.most * hidden / self.method.tensor
        found = 2 * labels * hidden
        if self.method.recompute == "full":
            return found
        left_out = rows.most - labels
        plain = self._bytes(kept.engine_mlp(self.architecture, self._run))
        spared = left_out * (plain + tasks.last_inputs) + tasks.last_own * left_out / np.maximum(rows.most, 1)
        return found - spared * (tasks.trained[:, -1] > 0)

    def _loss(self, rows: Rows) -> Array:
        """`[B]` of a chunk of logits, and of hidden states and their gradient."""
        per_row, most = kept.logits(self.architecture, self._run, self.method.tensor)
        hidden = self.architecture.hidden * self.itemsize
        labels = np.minimum(rows.labels, rows.most)
        found: Array = np.minimum(labels, most) * per_row + labels * hidden
        return found

    def _bytes(self, saved: Sequence[Saved]) -> float:
        return kept.total(saved, self.method.tensor, self.method.sequence_parallel)


class _Found(NamedTuple):
    """Of batches, by which tasks are in them.

    Attributes:
        trained: `[B, S]` layers with a gradient.
        inputs, all_inputs: `[B, S]` bytes of a row for inputs that adapters need: of the layer that keeps most, of all.
        own, all_own: `[B, S]` bytes of adapters' own.
        largest_copies, copies: `[B, S]` bytes of their factors as products take them.
        moment: `[B, S]` bytes that an adapter's backward pass takes for a moment.
        last_inputs: `[B]` bytes of a row for the last layer's MLP's.
        last_own: `[B]` bytes of adapters' own there.
    """

    trained: Array
    inputs: Array
    all_inputs: Array
    own: Array
    all_own: Array
    largest_copies: Array
    copies: Array
    moment: Array
    last_inputs: Array
    last_own: Array


class _OfTasks:
    """Constants of the tasks, and what they come to in batches."""

    def __init__(self, memory: StageMemory) -> None:
        a, run, method, tasks = memory.architecture, memory._run, memory.method, memory._tasks
        count, layers = len(tasks), len(a.layers)
        self.of_stage = memory._layers.astype(float)  # [L, S]
        self.on_first = memory._layers[:, 0]
        lowest = [min((site.layer for site in load.sites), default=layers) for load in memory.loads]
        if memory._comes_and_goes:
            lowest = [min(lowest, default=layers)] * count
        self.lowest = np.array(lowest, dtype=np.int64)
        self.layers = layers
        plain = memory._plain(memory._selective)
        self.width = {
            op: memory._bytes(kept.engine(a, run, frozenset([op]), memory._selective)) - plain for op in OPS
        }
        self.needs = {op: np.zeros((count, layers)) for op in OPS}
        self.views = {op: np.zeros((count, layers)) for op in OPS}
        # Tasks that scale an input, and tasks that need it afterwards: of both there are two.
        self.scaling = {op: np.zeros((count, layers)) for op in _ROW_PARALLEL}
        self.after = {
            op: memory._bytes([Saved("input after adapters", "columns", width, run.size)])
            for op, width in zip(_ROW_PARALLEL, (a.queries, a.ffn), strict=True)
        }
        self.own, self.own_mlp = np.zeros((count, layers)), np.zeros(count)
        self.copies, self.moment = np.zeros((count, layers)), np.zeros((count, layers))
        for k, task in enumerate(tasks):
            for layer in task.by_layer:
                for op in own.inputs([task], layer):
                    self.needs[op][k, layer] = 1.0  # type: ignore[index]
                for site in task.by_layer[layer]:
                    if site.kept.replaces_input:
                        self.scaling[site.op][k, layer] = 1.0
                for op in OPS:
                    there = replace(task, sites=tuple(s for s in task.by_layer[layer] if s.op == op))
                    self.views[op][k, layer] = memory._bytes(own.whole([there], layer, a, run))
                self.own[k, layer] = memory._bytes(own.rows(task, layer, a, run))
                self.copies[k, layer] = own.factors(task, layer, run, method.tensor)
                self.moment[k, layer] = own.scratch([task], [layer], method.tensor)
            mlp = replace(task, sites=tuple(s for s in task.sites if s.op in _MLP))
            self.own_mlp[k] = memory._bytes(own.rows(mlp, layers - 1, a, run))

    def at(self, rows: Array) -> _Found:
        """Of batches of `[B, K]` rows."""
        present = (rows > 0).astype(float)
        lowest = np.where(rows > 0, self.lowest, self.layers).min(axis=1, initial=self.layers)
        # A later stage's input has a gradient, whoever needs it.
        trained = ((np.arange(self.layers) >= lowest[:, None]) | ~self.on_first).astype(float)
        inputs = np.zeros_like(trained)
        last = np.zeros(len(rows))
        for op in OPS:
            needed = (present @ self.needs[op] > 0) * self.width[op]
            inputs += needed
            if op in _MLP:
                last += needed[:, -1]
        per_layer, copies, moment = rows @ self.own, present @ self.copies, present @ self.moment
        for op, scaling in self.scaling.items():
            twice = (present @ scaling > 0) & (present @ (self.needs[op] * (1 - scaling)) > 0)
            per_layer = per_layer + twice * self.after[op] * rows.sum(axis=1, keepdims=True)
        for views in self.views.values():
            if views.any():  # of a task's rows, they keep all rows of the batch
                whole = np.where(present[:, :, None] > 0, views, 0.0).max(axis=1)
                per_layer = per_layer + whole * rows.sum(axis=1, keepdims=True)
        return _Found(
            trained=trained @ self.of_stage,
            inputs=self._most(inputs),
            all_inputs=inputs @ self.of_stage,
            own=self._most(per_layer),
            all_own=per_layer @ self.of_stage,
            largest_copies=self._most(copies),
            copies=copies @ self.of_stage,
            moment=self._most(moment),
            last_inputs=last,
            last_own=rows @ self.own_mlp,
        )

    def _most(self, of_layers: Array) -> Array:
        """`[B, S]` the most of any layer of a stage."""
        columns = [of_layers[:, own > 0].max(axis=1, initial=0.0) for own in self.of_stage.T]
        return np.stack(columns, axis=1)


def _without_prefix(task: TaskAdapters) -> TaskAdapters:
    """A task's adapter less what it keeps for each sequence: that is counted with attention's copies."""
    return replace(task, virtual_tokens=0)
