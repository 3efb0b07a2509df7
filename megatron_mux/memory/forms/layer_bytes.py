"""Bytes of a row that a layer keeps, where tasks' sequences differ: a CPU computes attention of short ones otherwise.

Shapes: B micro-batches, K tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_mux.base_ops import BASE_OPS, EXPERT_OPS, LATENT_OPS, SHARED_OPS, BaseOpName
from megatron_mux.kernels.short_attention import LONGEST
from megatron_mux.memory.forms.beginnings import FIRSTS
from megatron_mux.memory.forms.engine_layer import EngineLayer

Array = npt.NDArray[np.float64]

OPS: tuple[BaseOpName, ...] = (*BASE_OPS, *LATENT_OPS, *SHARED_OPS, *EXPERT_OPS)
"""All BaseOps."""
_PARTS = (1, 2, 2 + len(OPS))
"""Where the fields of a `LayerBytes` begin, but for the first."""


class LayerBytes(NamedTuple):
    """Bytes of a row of one of a backbone's kinds of layers, on average over a micro-batch's rows.

    Attributes:
        plain: `[B]` kept whatever the adapters.
        above_attention: `[B]` of these, what is kept above attention.
        inputs: `[B, ops]` kept besides where an adapter needs a BaseOp's input.
        below: `[B, len(FIRSTS)]` of `plain`, what is not kept if gradients begin at a part of the layer.
    """

    plain: Array
    above_attention: Array
    inputs: Array
    below: Array


@dataclass(frozen=True)
class RowBytes:
    """What rows of each task keep.

    Attributes:
        layer: A layer of the backbone.
        lengths: Of each task's sequences.
        prefixed: Whether each task has virtual tokens.
    """

    layer: EngineLayer
    lengths: Sequence[Sequence[float]]
    prefixed: Sequence[bool]

    def at(self, rows: Array) -> LayerBytes:
        """What micro-batches with so many rows of each task, `[B, K]`, keep."""
        found = rows / np.maximum(rows.sum(axis=1, keepdims=True), 1e-9) @ self._of_tasks
        plain, above, inputs, below = np.split(found, _PARTS, axis=1)
        return LayerBytes(plain[:, 0], above[:, 0], inputs, below)

    @cached_property
    def _of_tasks(self) -> Array:
        """`[K, ...]` the numbers of a `LayerBytes`, on average over a task's rows."""
        found, alone = [], lru_cache(maxsize=None)(self._alone)
        for own, prefixed in zip(self.lengths, self.prefixed, strict=True):
            sizes, counts = np.unique(np.maximum(1, np.round(own)), return_counts=True)
            kept = np.array([alone(size, prefixed) for size in sizes.tolist()])
            found.append(np.average(kept, axis=0, weights=sizes * counts))
        return np.array(found).reshape(len(found), _PARTS[-1] + len(FIRSTS))

    def _alone(self, length: float, prefixed: bool) -> Array:
        """The numbers of a `LayerBytes`, of sequences of one length."""
        on_cpu = self.layer.device == "cpu"
        if on_cpu and prefixed:
            return _kept(replace(self.layer, length=int(length), prefixed=True))
        # Longer ones are computed alike, and so are all on a GPU.
        alike = min(int(length), LONGEST + 1) if on_cpu else self.layer.length
        return _kept(replace(self.layer, length=alike))


@lru_cache(maxsize=4096)
def _kept(layer: EngineLayer) -> Array:
    plain = layer.bytes(layer.kept())
    return np.array(
        [
            plain,
            layer.bytes(layer.kept(first="linear_proj")),
            *(layer.bytes(layer.adapter_inputs(frozenset([op]))) for op in OPS),
            *(plain - layer.bytes(layer.kept(first=at)) for at in FIRSTS),
        ]
    )
