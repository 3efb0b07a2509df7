"""Seconds of what is frozen, from a profile: the first term of equation 3, and attention sequence by sequence.

Shapes: B batches, S stages; arrays `[2, ...]` hold forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.base_ops import BASE_OPS
from megatron_mux.fusion.profile import Curve, Profile, points, summed

Array = npt.NDArray[np.float64]

_ATTENTION_OPS = ("norm", "linear_qkv", "rotary", "linear_proj", "glue_attention")
_MLP_OPS = ("norm", "linear_fc1", "activation", "linear_fc2", "glue_mlp")

_BELOW = {
    # What has no backward pass in the layer of the lowest adapter, by the BaseOp that has it.
    "linear_qkv": ("norm", "linear_qkv"),
    "linear_proj": ("norm", "linear_qkv", "rotary", "linear_proj"),
    "linear_fc1": (*_ATTENTION_OPS, "norm", "linear_fc1"),
    "linear_fc2": (*_ATTENTION_OPS, "norm", "linear_fc1", "activation", "linear_fc2"),
}


class Frozen:
    """Seconds of what is frozen, by stage.

    Args:
        profile: Seconds of operators.
        stages: The layers of each stage.
    """

    def __init__(self, profile: Profile, stages: Sequence[range]) -> None:
        curves = profile.curves
        self.curves = curves
        self.half = summed([curves[op] for op in _ATTENTION_OPS])
        self.mlp = summed([curves[op] for op in _MLP_OPS])
        self.below = [summed([curves[op] for op in _BELOW[op]]) for op in BASE_OPS]
        self.layers = np.array([len(layers) for layers in stages])
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
        """`[B, 2, S]` of the layers, for B batches.

        Args:
            rows: `[B]`.
            labels: `[B]`.
            attention: `[B, 2]` seconds in one layer.
            lowest: `[B]` number of the lowest BaseOp with an adapter: layer times BaseOps of a layer, and its index.
            recomputes: Whether layers are computed again in the backward pass. The embedding is not, nor the loss head,
                whose gradient comes with the forward pass.
        """
        layer, op = np.divmod(lowest, len(BASE_OPS))
        half, mlp, trimmed = self.half.many(rows), self.mlp.many(rows), self.mlp.many(labels)
        whole = half + mlp + attention.T  # [2, B]
        found = np.zeros((len(rows), 2, len(self.layers)))
        found[:, 0] = whole[0][:, None] * self.layers
        above = self._in_backward(layer)
        found[:, 1] = whole[1][:, None] * above
        here = self._is_at(layer)
        cut = np.stack([curve.many(rows)[1] for curve in self.below])[op, np.arange(len(rows))]
        cut = cut + np.where(op > 0, attention[:, 1], 0.0)
        found[:, 1] = np.maximum(0.0, found[:, 1] - here * cut[:, None])
        found[:, 0, -1] += trimmed[0] - mlp[0]
        found[:, 1, -1] = np.maximum(0.0, found[:, 1, -1] + (trimmed[1] - mlp[1]) * (above[:, -1] > 0))
        if recomputes:
            found[:, 1] += whole[0][:, None] * above
            found[:, 1, -1] += (trimmed[0] - mlp[0]) * (above[:, -1] > 0)
        return found

    def outside(self, rows: Array, labels: Array) -> Array:
        """`[B, 2, S]` seconds of embedding and loss head, for `[B]` rows and labels."""
        found = np.zeros((len(rows), 2, len(self.layers)))
        found[:, 0, 0] += self.curves["entry"].many(rows)[0]
        found[:, :, -1] += self.curves["head"].many(labels).T
        return found

    def halves(self, rows: Array, attention: Array) -> Array:
        """`[B, 2 (attention, MLP), 2]` seconds of the halves of a layer, forward and backward.

        Args:
            rows, attention: See `seconds`.
        """
        return np.stack([self.half.many(rows).T + attention, self.mlp.many(rows).T], axis=1)

    def all_reduces(self, lowest: npt.NDArray[np.int64], recomputes: bool) -> Array:
        """`[B, 2, S]` all-reduces of hidden states over tensor ranks: two a layer in either pass, but none of a
        gradient that nothing needs; and two more for each layer that is recomputed.

        Args:
            lowest, recomputes: See `seconds`.
        """
        layer, op = np.divmod(lowest, len(BASE_OPS))
        found = np.repeat(self._in_backward(layer)[:, None], 2, axis=1)
        found[:, 0] = 2 * self.layers
        found[:, 1] *= 4 if recomputes else 2
        # What enters the lowest adapter's layer needs no gradient; nor what enters its MLP, if the adapter is there.
        needless = np.where(op < BASE_OPS.index("linear_fc1"), 1, 2)
        found[:, 1] -= self._is_at(layer) * needless[:, None]
        return found

    def _in_backward(self, layer: npt.NDArray[np.int64]) -> Array:
        """`[B, S]` layers with a backward pass: those from the lowest adapter's on (`layer`)."""
        found: Array = np.clip(self.stops - np.maximum(layer[:, None], self.starts), 0, self.layers)
        return found.astype(np.float64)

    def _is_at(self, layer: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """`[B, S]` whether the lowest adapter's layer is on a stage."""
        found: npt.NDArray[np.bool_] = (self.starts <= layer[:, None]) & (layer[:, None] < self.stops)
        return found


class AttentionCosts:
    """Seconds of core attention in one layer.

    Args:
        profile: Seconds at a grid of lengths and pasts.
    """

    def __init__(self, profile: Profile) -> None:
        self.in_one_call = profile.attention_in_one_call
        known: dict[int, dict[float, tuple[float, float]]] = {}
        for name, curve in profile.curves.items():
            if name.startswith("attention:"):
                _, length, past = name.split(":")
                known.setdefault(int(length), {})[int(past)] = self._of_one(curve)
        # For each length of the grid, seconds of one sequence over its past.
        self.over_past = {length: points(known[length]) for length in sorted(known)}
        self._shortest = profile.curves[f"attention:{min(known)}:0"]

    @property
    def launch(self) -> Array:
        """`[2]` seconds that a batch pays once, where one kernel serves all its sequences; else nothing."""
        return np.array(self._shortest.at(1)) if self.in_one_call else np.zeros(2)

    def of(self, length: int, past: int) -> Array:
        """`[2]` seconds of one sequence in one layer, forward and backward: linear between the grid's points."""
        over_length = points({n: curve.at(past) for n, curve in self.over_past.items()})
        return np.array(over_length.at(length))

    def _of_one(self, curve: Curve) -> tuple[float, float]:
        """Seconds of one sequence, of a curve over their number."""
        forward, backward = curve.at(1)
        if not self.in_one_call or len(curve.sizes) == 1:
            return forward, backward
        # The launch is paid once a batch; a sequence takes what another one more takes.
        more_forward, more_backward = curve.at(8)
        return (more_forward - forward) / 7, (more_backward - backward) / 7
