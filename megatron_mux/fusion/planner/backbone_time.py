"""Seconds of what is frozen, from a profile: the first term of equation 3, and attention sequence by sequence.

Shapes: B batches, S stages, L layers, M kinds of layers: dense ones, ones with experts, or both; arrays `[2, ...]` hold
forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.profiler.layer_operators import ORDER, base_ops, below, mlp_operators
from megatron_mux.fusion.profiler.profile import Curve, Profile, summed
from megatron_mux.shape import BackboneShape

Array = npt.NDArray[np.float64]


class BackboneTimeModel:
    """Seconds of what is frozen, by stage.

    Attributes:
        experts: `[M]` whether layers of a kind have experts.
        kinds: `[L]` the kind of each layer.
        layers: `[M, S]` layers of each kind on each stage.
    """

    def __init__(self, profile: Profile, shape: BackboneShape, stages: Sequence[range]) -> None:
        curves = profile.curves
        self.curves = curves
        has_experts = [shape.has_experts(layer) for layer in range(shape.layers)]
        self.experts = sorted(set(has_experts))
        self.kinds = [self.experts.index(kind) for kind in has_experts]
        self.half = curves["attention_half"]
        self.mlps = [summed([curves[op] for op in mlp_operators(shape, experts)]) for experts in self.experts]
        known = base_ops(shape)
        self.below = [
            summed([curves[name] for name in below(shape, op)])
            if op in known
            else Curve((1,), (0.0,), (0.0,))
            for op in ORDER
        ]
        # `[L + 1, M, S]` layers of each kind on each stage, from each layer on.
        self.above = np.zeros((shape.layers + 1, len(self.experts), len(stages)))
        for stage, layers in enumerate(stages):
            for layer in layers:
                self.above[: layer + 1, self.kinds[layer], stage] += 1
        self.layers: Array = self.above[0]
        self.starts = np.array([layers.start for layers in stages])
        self.stops = np.array([layers.stop for layers in stages])

    def seconds(
        self,
        rows: Array,
        labels: Array,
        attention: Array,
        lowest: npt.NDArray[np.int64],
        recomputes: bool,
    ) -> Array:
        """`[B, 2, S]` of the layers, for B batches, without messages.

        Args:
            rows: `[B]`.
            labels: `[B]`.
            attention: `[B, 2, S]` seconds in a layer of each stage.
            lowest: `[B]` the lowest BaseOp with an adapter: layer times `len(ORDER)`, and its place there; -1: the
                embedding.
            recomputes: Whether layers are computed again in the backward pass. The embedding is not, nor the loss head,
                whose gradient comes with the forward pass.
        """
        layer, op = np.divmod(lowest, len(ORDER))
        half = self.half.many(rows)  # [2, B]
        whole = np.stack([half + mlp.many(rows) for mlp in self.mlps], axis=2)  # [2, B, M]
        last = self.mlps[self.kinds[-1]]
        trimmed = last.many(labels) - last.many(rows)
        seconds = np.zeros((len(rows), 2, len(self.starts)))
        above = self.from_layer(layer)  # [B, M, S]
        seconds[:, 0] = whole[0] @ self.layers + attention[:, 0] * self.layers.sum(axis=0)
        seconds[:, 1] = np.einsum("bm,bms->bs", whole[1], above) + attention[:, 1] * above.sum(axis=1)
        cut = np.stack([curve.many(rows)[1] for curve in self.below])[op, np.arange(len(rows))]
        cored = (op >= ORDER.index("linear_proj"))[:, None] * attention[:, 1]
        seconds[:, 1] = np.maximum(0.0, seconds[:, 1] - self.is_at(layer) * (cut[:, None] + cored))
        seconds[:, 0, -1] += trimmed[0]
        trained = above[:, :, -1].sum(axis=1) > 0
        seconds[:, 1, -1] = np.maximum(0.0, seconds[:, 1, -1] + trimmed[1] * trained)
        if "dequantise" in self.curves:  # once a pass, whatever the rows
            once = self.curves["dequantise"].at(1)
            seconds[:, 0] += once[0] * self.layers.sum(axis=0)
            seconds[:, 1] += once[1] * above.sum(axis=1)
        if recomputes:
            seconds[:, 1] += np.einsum("bm,bms->bs", whole[0], above) + attention[:, 0] * above.sum(axis=1)
            seconds[:, 1, -1] += trimmed[0] * trained
        return seconds

    def outside(self, rows: Array, labels: Array) -> Array:
        """`[B, 2, S]` seconds of embedding and loss head, for `[B]` rows and labels."""
        seconds = np.zeros((len(rows), 2, len(self.starts)))
        seconds[:, 0, 0] += self.curves["entry"].many(rows)[0]
        seconds[:, :, -1] += self.curves["head"].many(labels).T
        return seconds

    def dense_seconds(self, rows: float) -> float:
        """Seconds of all layers' operators that depend on the number of rows alone, forward and backward."""
        halves = [self.half.at(rows), *(self.mlps[kind].at(rows) for kind in self.kinds)]
        return sum(halves[0]) * len(self.kinds) + sum(map(sum, halves[1:]))

    def from_layer(self, layer: npt.NDArray[np.int64]) -> Array:
        """`[B, M, S]` layers of each kind on each stage, from a layer `[B]` on; -1: from the embedding on."""
        above: Array = self.above[np.maximum(layer, 0)]
        return above

    def is_at(self, layer: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`[B, S]` whether a layer `[B]` is on a stage."""
        is_at: npt.NDArray[np.bool_] = (self.starts <= layer[:, None]) & (layer[:, None] < self.stops)
        return is_at
