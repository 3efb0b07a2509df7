"""Seconds of core attention, sequence by sequence: those of a profile between its points, beyond them by the work."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

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
        measured: The window that the curves were measured with, the same or a wider one.

    Attributes:
        over_past: For each probed length, seconds of one sequence over its past.
        launch: `[2]` seconds that a batch takes whatever its sequences.
    """

    def __init__(
        self, curves: Mapping[str, Curve], window: int | None = None, measured: int | None = None
    ) -> None:
        self._window, self._measured = window or math.inf, measured or math.inf
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
        length. A window narrower than the measured one takes its part of the pairs.
        """
        part = self._pairs(length, past, self._window) / self._pairs(length, past, self._measured)
        return self._unlimited(length, past) * part

    def _unlimited(self, length: int, past: int) -> Array:
        """The same with the window that was measured."""
        over_past = self._with_past if past and self._with_past else self.over_past
        lengths = list(over_past)
        i = bisect_left(lengths, length)
        low: Array = np.maximum(over_past[lengths[max(0, i - 1)]].at(past), _NEXT_TO_NOTHING)
        if i == 0:  # a sequence takes no less than the shortest
            return low
        if i == len(lengths):
            most = self._measured
            return low * (self._pairs(length, past, most) / self._pairs(lengths[-1], past, most))
        high: Array = np.maximum(over_past[lengths[i]].at(past), _NEXT_TO_NOTHING)
        share = math.log(length / lengths[i - 1]) / math.log(lengths[i] / lengths[i - 1])
        return np.asarray(low * (high / low) ** share)

    def _pairs(self, length: int, past: int, window: float) -> float:
        pattern = self._own if past else _CAUSAL
        return length * min(pattern * length + past, window)


class StageAttention:
    """Seconds of core attention in the layers of each stage, which may have several windows.

    Args:
        curves: Those of a profile, measured with the widest window.
        windows: For each layer, tokens that a token sees; None: all.

    Attributes:
        longest: The longest probed length up to 1,024 tokens.
        launch: `[2, 1]` seconds that a batch takes in a layer whatever its sequences.
    """

    def __init__(
        self, curves: Mapping[str, Curve], windows: Sequence[int | None], stages: Sequence[range]
    ) -> None:
        widest, distinct = widest_window(windows), list(dict.fromkeys(windows))
        self._costs = [AttentionCosts(curves, window, widest) for window in distinct]
        counts = [[sum(windows[i] == window for i in layers) for layers in stages] for window in distinct]
        self._shares = np.array(counts) / [max(1, len(layers)) for layers in stages]  # [windows, S]
        self.longest = max(n for n in self._costs[0].over_past if n <= 1024)
        self.launch: Array = self._costs[0].launch[:, None]

    def of(self, length: int, past: int) -> Array:
        """`[2, S]` seconds of one sequence in a layer of each stage, on average over its layers."""
        seconds: Array = np.stack([cost.of(length, past) for cost in self._costs], axis=1) @ self._shares
        return seconds


def widest_window(windows: Sequence[int | None]) -> int | None:
    """The widest window of layers, with which attention is measured; None: some layer sees all."""
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None


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
