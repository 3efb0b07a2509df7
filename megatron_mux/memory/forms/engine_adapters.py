"""Bytes that adapters keep and take in the engine, for all micro-batches at once.

Tasks share tensors: the input of a BaseOp is kept once for all adapters there that need it. So each task has tables of
what it needs in which layer, and micro-batches look up which of their tasks do.

Shapes: B micro-batches, K tasks, L layers, S stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.adapters.costs import Kept, Row, Where
from megatron_mux.base_ops import COLUMN_PARALLEL, EXPERT_OPS, REPLICATED, SHARED_OPS, BaseOpName
from megatron_mux.kernels.terms import LATENT_MULTIPLE
from megatron_mux.memory.forms.beginnings import FIRSTS
from megatron_mux.memory.forms.layer_bytes import OPS, LayerBytes
from megatron_mux.memory.forms.layer_kinds import LayerKinds
from megatron_mux.memory.forms.task_adapters import TaskAdapters

Array = npt.NDArray[np.float64]

_BEHIND_ATTENTION: tuple[BaseOpName, ...] = ("linear_fc1", "linear_fc2", *SHARED_OPS, *EXPERT_OPS)
_SAME_INPUT: Mapping[BaseOpName, BaseOpName] = {
    "linear_q": "linear_kv_down",
    "linear_q_down": "linear_kv_down",
}
"""BaseOps whose input is that of another one."""


class AdapterBytes(NamedTuple):
    """Bytes of micro-batches that depend on which tasks are in them.

    Attributes:
        trained: `[B, L]` 1 where a layer has a gradient.
        plain: `[B, L]` bytes of a row that a layer with a gradient keeps, whatever the adapters.
        below_first: `[B, S]` bytes of a row that the first of them does not keep, below its first adapter.
        inputs: `[B, L]` bytes of a row for inputs that adapters need.
        own: `[B, L]` bytes of adapters' own.
        scratch: `[B, L]` bytes that an adapter's backward pass takes for a moment.
        multiplied, multiplied_behind: `[B, L]` bytes of tensors that an adapter's backward pass multiplies, up to
            attention's end and behind it.
        fc2_inputs: `[B, L]` bytes of a row of `inputs` for linear_fc2, of those that were replaced, too.
        last_inputs: `[B]` bytes of a row of `inputs` behind the last layer's attention.
        last_own: `[B]` bytes of `own` there.
    """

    trained: Array
    plain: Array
    below_first: Array
    inputs: Array
    own: Array
    scratch: Array
    multiplied: Array
    multiplied_behind: Array
    fc2_inputs: Array
    last_inputs: Array
    last_own: Array


class AdapterTables:
    """Tables of what each task's adapter needs in every layer.

    Args:
        kinds: The layers of the backbone.
        tasks: The adapters.
        stages: The layers of each stage.

    Attributes:
        of_stage: `[L, S]` 1 where a layer is a stage's.
    """

    def __init__(
        self,
        kinds: LayerKinds,
        tasks: Sequence[TaskAdapters],
        stages: Sequence[range],
    ) -> None:
        self._kinds, self._layer = kinds, kinds.kinds[0]
        self._pairs = kinds.each(lambda layer: layer.pairs)
        layers = len(self._pairs)
        shape = (len(tasks), layers)
        self.of_stage: Array = np.array([[float(i in own) for own in stages] for i in range(layers)])
        self._inputs = {op: np.zeros(shape) for op in OPS}
        self._outputs = {op: np.zeros(shape) for op in OPS}
        self._replaced = {op: np.zeros(shape) for op in OPS}
        self._latent = {(op, behind): np.zeros(shape) for op in OPS for behind in (False, True)}
        self._own, self._scratch = np.zeros(shape), np.zeros(shape)
        self._multiplied, self._multiplied_behind = np.zeros(shape), np.zeros(shape)
        self._own_behind = np.zeros(len(tasks))
        self._lowest = np.array([task.lowest for task in tasks], dtype=np.int64)
        for k, task in enumerate(tasks):
            layers_of: dict[tuple[BaseOpName, Kept], list[int]] = {}
            for adapted in task.ops:
                layers_of.setdefault((adapted.op, adapted.kept), []).append(adapted.layer)
            for (op, kept), own in layers_of.items():
                self._enter(k, op, kept, np.array(own))

    def _enter(self, k: int, op: BaseOpName, kept: Kept, at: npt.NDArray[np.int64]) -> None:
        """Add a BaseOp that task `k` adapts alike in these layers to the tables."""
        place = (k, at)
        found, own = self._priced(op, kept)
        needed = self._inputs[_SAME_INPUT.get(op, op)]
        needed[place] = np.maximum(needed[place], found.input)
        self._outputs[op][place] = np.maximum(self._outputs[op][place], found.output)
        self._replaced[op][place] = np.maximum(self._replaced[op][place], found.replaces_input)
        latent = self._latent[op, found.output]
        rows = self._pairs[at] if op in EXPERT_OPS else 1.0
        latent[place] = np.maximum(latent[place], rows * _whole(found.latent) * self._layer.size)
        self._own[place] += own
        self._scratch[place] = np.maximum(self._scratch[place], 4 * found.scratch / self._layer.tensor)
        multiplied = self._multiplied_behind if op in _BEHIND_ATTENTION else self._multiplied
        multiplied[place] = np.maximum(multiplied[place], self._multiplied_bytes(op, found))
        if op in _BEHIND_ATTENTION:
            self._own_behind[k] += own * np.count_nonzero(at == len(self.of_stage) - 1)

    def _priced(self, op: BaseOpName, kept: Kept) -> tuple[Kept, float]:
        """What an adapter keeps at a BaseOp, and bytes of a row of its own."""
        layer = self._layer
        # What follows a row-parallel BaseOp is computed task by task if tensor ranks divide the rows there.
        divided = layer.sequence_parallel and kept.output and op not in COLUMN_PARALLEL
        if kept.grouped is not None and layer.groups_rows and not divided:
            kept = kept.grouped
        return kept, layer.bytes(kept.rows)

    def _multiplied_bytes(self, op: BaseOpName, kept: Kept) -> float:
        """Bytes of a row of tensors that an adapter's backward pass multiplies: three in the parameters' precision,
        and the product rounded to the backbone's."""
        size = self._layer.size
        where: Where = "rows" if kept.output and op not in COLUMN_PARALLEL else _columns(op)
        width = kept.multiplied * (3 * max(4, size) + size * (size < 4))
        return self._layer.bytes([Row("multiplied", where, width, 1)])

    @property
    def step_scratch(self) -> Array:
        """`[S]` bytes that the optimizer step of one adapter takes for a moment."""
        found: Array = self.most(self._scratch.max(axis=0, initial=0.0)[None, :])[0]
        return found

    def at(self, rows: Array, kept: Sequence[LayerBytes], together: bool) -> AdapterBytes:
        """Bytes that the adapters of micro-batches of `[B, K]` rows keep and take.

        Args:
            rows: Rows of each task.
            kept: What a layer of each kind keeps of a row.
            together: Whether gradients begin where those of any task do, whichever tasks are in the micro-batch.
        """
        layers, count = len(self.of_stage), len(FIRSTS)
        present = (rows > 0).astype(float)
        everyone = self._lowest.min(initial=layers * count)
        lowest = np.where(rows > 0, self._lowest, layers * count).min(axis=1, initial=layers * count)
        lowest = np.full_like(lowest, everyone) if together else lowest
        begins = lowest // count
        trained = (np.arange(layers) >= begins[:, None]).astype(float)
        first = np.arange(layers) == begins[:, None]
        below = np.stack([one.below for one in kept])[self._kinds.of_layer]  # [L, B, FIRSTS]
        widths = np.stack([one.inputs for one in kept])[self._kinds.of_layer]  # [L, B, ops]
        inputs, last = np.zeros_like(trained), np.zeros(len(rows))
        for index, op in enumerate(OPS):
            needed = (present @ self._inputs[op] > 0) * widths[:, :, index].T
            inputs += needed
            if op in _BEHIND_ATTENTION:
                last += needed[:, -1]
            if op == "linear_fc2":
                fc2_inputs = needed + self._replaced_inputs(present, op)
        everything = rows.sum(axis=1, keepdims=True)
        # An input that one adapter replaces for others goes backward once these are done with theirs.
        behind = _largest(rows, self._multiplied_behind)
        behind = behind - everything * self._replaced_inputs(present, "linear_fc2")
        return AdapterBytes(
            trained=trained,
            plain=trained * self._kinds.spread([one.plain for one in kept]),
            below_first=(first * below[:, np.arange(len(rows)), lowest % count].T) @ self.of_stage,
            inputs=inputs,
            own=rows @ self._own + everything * self._shared(present),
            scratch=_largest(present, self._scratch),
            multiplied=_largest(rows, self._multiplied),
            multiplied_behind=np.maximum(behind, 0.0),
            fc2_inputs=fc2_inputs,
            last_inputs=last,
            last_own=rows @ self._own_behind,
        )

    def _shared(self, present: Array) -> Array:
        """`[B, L]` bytes of a row that all rows keep since some task's adapter needs its own: one tensor for all."""
        found: Array = np.zeros((len(present), len(self.of_stage)))
        for op in OPS:
            _, out = self._layer.architecture.widths[op]
            column = op in COLUMN_PARALLEL
            output = Row("output before adapters", _columns(op) if column else "rows", out)
            found += (present @ self._outputs[op] > 0) * self._layer.bytes([output])
            found += _largest(present, self._latent[op, False]) + _largest(present, self._latent[op, True])
            if not column:
                found += self._replaced_inputs(present, op)
        return found

    def _replaced_inputs(self, present: Array, op: BaseOpName) -> Array:
        """`[B, L]` bytes of a row of an input that one adapter has replaced and another needs: beside the first one."""
        after = Row("input after adapters", "columns", self._layer.architecture.widths[op][0])
        others = self._inputs[op] * (1 - self._replaced[op])
        both = (present @ self._replaced[op] > 0) & (present @ others > 0)
        found: Array = both.astype(float) * self._layer.bytes([after])
        return found

    def most(self, of_layers: Array) -> Array:
        """`[B, S]` the most of any layer of a stage."""
        columns = [of_layers[:, own > 0].max(axis=1, initial=0.0) for own in self.of_stage.T]
        return np.stack(columns, axis=1)


def _columns(op: BaseOpName) -> Where:
    """The part that a tensor rank has of a column-parallel BaseOp's output."""
    return "all" if op in REPLICATED else "columns"


def _whole(columns: int) -> int:
    """The width of a latent tensor with so many columns."""
    return -(-columns // LATENT_MULTIPLE) * LATENT_MULTIPLE


def _largest(weights: Array, table: Array) -> Array:
    """`[B, L]` the largest entry of any task, each times the task's weight of `[B, K]`."""
    found = np.zeros((len(weights), table.shape[1]))
    for task in np.flatnonzero(table.any(axis=1) & weights.any(axis=0)):
        present = np.flatnonzero(weights[:, task])
        found[present] = np.maximum(found[present], weights[present, task, None] * table[task])
    return found
