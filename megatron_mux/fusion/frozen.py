"""Seconds of what is frozen, from a profile: the first term of equation 3, and attention sequence by sequence.

Shapes: B batches, S stages; arrays `[2, ...]` hold forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_mux.base_ops import BASE_OPS
from megatron_mux.fusion.profile import Profile, summed

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

    def seconds(self, rows: Array, labels: Array, attention: Array, lowest: npt.NDArray[np.int64]) -> Array:
        """`[B, 2, S]` of B batches.

        Args:
            rows: `[B]`.
            labels: `[B]`.
            attention: `[B, 2]` seconds in one layer.
            lowest: `[B]` number of the lowest BaseOp with an adapter: layer times BaseOps of a layer, and its index.
        """
        layer, op = np.divmod(lowest, len(BASE_OPS))
        half, mlp, trimmed = self.half.many(rows), self.mlp.many(rows), self.mlp.many(labels)
        whole = half + mlp + attention.T  # [2, B]
        found = np.zeros((len(rows), 2, len(self.layers)))
        found[:, 0] = whole[0][:, None] * self.layers
        above = np.clip(self.stops - np.maximum(layer[:, None], self.starts), 0, self.layers)
        found[:, 1] = whole[1][:, None] * above
        here = (self.starts <= layer[:, None]) & (layer[:, None] < self.stops)
        cut = np.stack([curve.many(rows)[1] for curve in self.below])[op, np.arange(len(rows))]
        cut = cut + np.where(op > 0, attention[:, 1], 0.0)
        found[:, 1] = np.maximum(0.0, found[:, 1] - here * cut[:, None])
        found[:, 0, 0] += self.curves["entry"].many(rows)[0]
        head = self.curves["head"].many(labels)
        found[:, 0, -1] += trimmed[0] - mlp[0] + head[0]
        found[:, 1, -1] = np.maximum(
            0.0, found[:, 1, -1] + (trimmed[1] - mlp[1]) * (above[:, -1] > 0) + head[1]
        )
        return found


class Attention:
    """Seconds of core attention in one layer.

    Args:
        profile: Seconds at a grid of lengths and pasts.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.pasts: dict[int, list[int]] = {}
        for name in profile.curves:
            if name.startswith("attention:"):
                _, length, past = name.split(":")
                self.pasts.setdefault(int(length), []).append(int(past))
        for known in self.pasts.values():
            known.sort()
        self.lengths = sorted(self.pasts)

    @property
    def launch(self) -> Array:
        """`[2]` seconds that a batch pays once, where one kernel serves all its sequences; else nothing."""
        if not self.profile.attention_in_one_call:
            return np.zeros(2)
        return np.array(self.profile.curves[f"attention:{self.lengths[0]}:0"].at(1))

    def of(self, length: int, past: int) -> Array:
        """Attention of one sequence in one layer: between the grid's lengths and pasts linear."""
        low, high, share = _between(self.lengths, length)
        found = np.zeros(2)
        for n, weight in ((low, 1 - share), (high, share)):
            if not weight:
                continue
            known = self.pasts[n]
            a, b, part = _between(known, past)
            for p, w in ((a, 1 - part), (b, part)):
                if w:
                    found += weight * w * self.point(n, p)
        return found

    def point(self, length: int, past: int) -> Array:
        """`[2]` seconds of one sequence at a point of the grid, forward and backward."""
        curve = self.profile.curves[f"attention:{length}:{past}"]
        one = np.array(curve.at(1))
        if self.profile.attention_in_one_call:
            # The launch is paid once a batch; a sequence takes what another one more takes.
            return (np.array(curve.at(8)) - one) / 7 if len(curve.sizes) > 1 else one
        return one


def _between(known: Sequence[int], value: float) -> tuple[int, int, float]:
    """The two known points to interpolate between or to extend beyond, and the share of the second."""
    if len(known) == 1 or value <= known[0]:
        return known[0], known[0], 0.0
    i = next((i for i, k in enumerate(known) if k >= value), len(known) - 1)
    low, high = known[i - 1], known[i]
    return low, high, (value - low) / (high - low)
