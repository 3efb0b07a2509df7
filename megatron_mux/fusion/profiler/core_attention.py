"""Seconds of core attention, sequence by sequence: those of a profile between its points, beyond them by the work."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.profiler.profile import Curve

Array = npt.NDArray[np.float64]

_CAUSAL = 0.5
"""Part of a sequence's own pairs that causal kernels compute; with a mask in memory, all are."""

_NEXT_TO_NOTHING = 1e-12
"""Seconds where none were seen: powers are of positive numbers."""


class AttentionCosts:
    """Seconds of core attention in one layer, with what chunks do to have the keys and values of earlier ones.

    Args:
        curves: Those of a profile.
        window: Tokens that a token sees; None: all.

    Attributes:
        over_past: For each length of the grid, seconds of one sequence over its past.
        launch: `[2]` seconds that a batch takes whatever its sequences.
    """

    def __init__(self, curves: Mapping[str, Curve], window: int | None = None) -> None:
        self._window = window or math.inf
        lengths = sorted(int(name.partition(":")[2]) for name in curves if name.startswith("attention:"))
        self.over_past = {length: curves[f"attention:{length}"] for length in lengths}
        # Behind a past kernels are others than without one, however short it is.
        behind = {length: _behind(curve) for length, curve in self.over_past.items()}
        self._with_past = {length: curve for length, curve in behind.items() if len(curve.sizes) > 1}
        self._own = _own_share(self._with_past)
        self.launch: Array = np.array(curves["attention_launch"].at(1))

    def of(self, length: int, past: int) -> Array:
        """`[2]` seconds of one sequence in one layer, forward and backward.

        Linear over pasts, of which the shortest that was measured stands for shorter ones. Over the length a power
        between two points, since what is linear (the sequence's own rows, the copy of the past) and what is quadratic
        share the seconds; beyond the last point as the pairs of tokens: quadratic in the length, linear in past times
        length.
        """
        over_past = self._with_past if past and self._with_past else self.over_past
        lengths = list(over_past)
        i = bisect_left(lengths, length)
        low: Array = np.maximum(over_past[lengths[max(0, i - 1)]].at(past), _NEXT_TO_NOTHING)
        if i == 0:  # a sequence takes no less than the shortest
            return low
        if i == len(lengths):
            return low * (self._pairs(length, past) / self._pairs(lengths[-1], past))
        high: Array = np.maximum(over_past[lengths[i]].at(past), _NEXT_TO_NOTHING)
        share = math.log(length / lengths[i - 1]) / math.log(lengths[i] / lengths[i - 1])
        return np.asarray(low * (high / low) ** share)

    def _pairs(self, length: int, past: int) -> float:
        own = self._own if past else _CAUSAL
        return length * min(own * length + past, self._window)


def _behind(curve: Curve) -> Curve:
    """The points behind a past; all of them if there are not two, which a slope needs."""
    first = bisect_right(curve.sizes, 0)
    if len(curve.sizes) - first < 2:
        return curve
    return Curve(curve.sizes[first:], curve.forward[first:], curve.backward[first:])


def _own_share(with_past: Mapping[int, Curve]) -> float:
    """Part of a sequence's own pairs that the kernel for pasts computes: what is left of its seconds without a past."""
    if not with_past:
        return _CAUSAL
    length = max(with_past)
    curve = with_past[length]
    first, last = curve.sizes[0], curve.sizes[-1]
    least, most = sum(curve.at(first)), sum(curve.at(last))
    if most <= least:
        return 1.0
    seen = least * (last - first) / (most - least)  # keys of a query
    return min(1.0, max(_CAUSAL, (seen - first) / length))
