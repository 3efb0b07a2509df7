"""Seconds of core attention, sequence by sequence: those of a profile between its points, beyond them by the work."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from megatron_mux.fusion.profiler.profile import Curve

Array = npt.NDArray[np.float64]

_NEXT_TO_NOTHING = 1e-12
"""Seconds where none were seen: powers are of positive numbers."""


class AttentionCosts:
    """Seconds of core attention in one layer, with what chunks do to have the keys and values of earlier ones.

    Args:
        curves: Those of a profile.

    Attributes:
        over_past: For each length of the grid, seconds of one sequence over its past.
        launch: `[2]` seconds that a batch takes whatever its sequences.
    """

    def __init__(self, curves: Mapping[str, Curve]) -> None:
        lengths = sorted(int(name.partition(":")[2]) for name in curves if name.startswith("attention:"))
        self.over_past = {length: curves[f"attention:{length}"] for length in lengths}
        self._with_past = {length: curve for length, curve in self.over_past.items() if len(curve.sizes) > 1}
        self.launch: Array = np.array(curves["attention_launch"].at(1))

    def of(self, length: int, past: int) -> Array:
        """`[2]` seconds of one sequence in one layer, forward and backward.

        Linear over the past. Over the length a power between two points, since what is linear (the sequence's own
        rows, the copy of the past) and what is quadratic share the seconds; beyond the last point as the pairs of
        tokens: quadratic in the length, linear in past times length.
        """
        return _at_length(self._with_past if past and self._with_past else self.over_past, length, past)


def _at_length(over_past: Mapping[int, Curve], length: int, past: int) -> Array:
    lengths = list(over_past)
    i = bisect_left(lengths, length)
    if i == 0:
        return np.array(over_past[lengths[0]].at(past))
    low: Array = np.array(over_past[lengths[i - 1]].at(past))
    if i == len(lengths):
        low *= length * (length + past) / (lengths[-1] * (lengths[-1] + past))
        return low
    high: Array = np.maximum(over_past[lengths[i]].at(past), _NEXT_TO_NOTHING)
    low = np.maximum(low, _NEXT_TO_NOTHING)
    share = math.log(length / lengths[i - 1]) / math.log(lengths[i] / lengths[i - 1])
    return np.asarray(low * (high / low) ** share)
